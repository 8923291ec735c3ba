// Calls the pure functions of the page's modules: one JSON request per line, one JSON reply.

import { createInterface } from "node:readline";

const [folder] = process.argv.slice(2);
const load = (name) => import(`file://${folder}/${name}.js`);
const { blocks } = await load("blocks");
const { inline, safeUrl } = await load("inline");
const settings = await load("settings");
const status = await load("status");
const stream = await load("stream");

/** Node trees with all inline text parsed, as [tag, attributes, ...kids]. */
function tree(node) {
  if (typeof node === "string") return node;
  if (node.tag === "pre") return ["pre", { language: node.language }, node.code];
  const { tag, kids, text, source, ...attributes } = node;
  const shown = Object.fromEntries(
    Object.entries(attributes).filter(([, value]) => value !== null),
  );
  return [tag, shown, ...(kids ?? inline(text)).map(tree)];
}

const functions = {
  markdown: (text) => blocks(text).map(tree),
  sources: (text) => blocks(text).map((block) => block.source),
  safeUrl,
  events(pieces) {
    const parser = new stream.EventParser();
    return pieces.flatMap((piece) => parser.push(piece));
  },
  addChunks(chunks) {
    const message = stream.emptyAnswer();
    for (const chunk of chunks) stream.addChunk(message, chunk);
    return message;
  },
  errorOf(code, body) {
    const { message, status: of, code: word, param } = stream.errorOf(code, body);
    return { message, status: of, code: word, param };
  },
  forRequest: stream.forRequest,
  requestFields: settings.requestFields,
  bytes: status.bytes,
  duration: status.duration,
};

for await (const line of createInterface({ input: process.stdin })) {
  const { name, args } = JSON.parse(line);
  let reply;
  try {
    reply = { value: functions[name](...args) };
  } catch (error) {
    reply = { error: String(error) };
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}
