// The blocks of Markdown as models write it. Pure: a text in, nodes out, nothing of a page.
//
// A node is {tag, kids} or {tag, text} with `text` still to be parsed by `inline.js`; a code block is
// {tag: "pre", language, code}. Deviations from CommonMark, which suit answers better: no indented
// code, no setext headings, nested lists may be indented by two.

const MAX_DEPTH = 12; // of nested quotes and lists; deeper is text

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** The block nodes of a text, each with the `source` it came from. */
export function blocks(text) {
  return parseBlocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function parseBlocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [node, end] = parseBlock(lines, at, depth);
    node.source = lines.slice(at, end).join("\n");
    found.push(node);
    at = end;
  }
  return found;
}

/** The block that begins at a line that is not blank, and the line after it. */
function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fencedCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = heading[1].length;
    return [{ tag: `h${level}`, text: headingText(line.slice(heading[0].length)) }, at + 1];
  }
  if (RULE.test(line)) return [{ tag: "hr", kids: [] }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (listMarker(line)) return list(lines, at, depth);
  }
  if (startsTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function isBlank(line) {
  return line.trim() === "";
}

function fencedCode(lines, at, [, indent, fence, info]) {
  const code = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const closing = lines[end].trim();
    if (closing.length >= fence.length && closing === fence[0].repeat(closing.length)) break;
    code.push(stripIndent(lines[end], indent.length));
  }
  const language = info.trim().split(/\s/)[0].slice(0, 40);
  // The closing line belongs to the block; a stream that has not brought it yet ends in code.
  return [{ tag: "pre", language, code: code.join("\n") }, Math.min(end + 1, lines.length)];
}

function headingText(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (end > 0 && trimmed[end - 1] === "#") end -= 1;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trim() : trimmed;
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) {
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [{ tag: "blockquote", kids: parseBlocks(inner, depth + 1) }, end];
}

function listMarker(line) {
  const match = ITEM.exec(line);
  if (!match || RULE.test(line)) return null;
  const [all, indent, marker, space] = match;
  const inside = space.length > 4 || all.length === line.length ? 1 : space.length;
  const width = indent.length + marker.length + inside;
  return { indent: indent.length, kind: marker.slice(-1), number: parseInt(marker, 10), width };
}

function list(lines, at, depth) {
  const first = listMarker(lines[at]);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const marker = listMarker(lines[end]);
    if (!marker || marker.kind !== first.kind || marker.indent > first.indent + 1) break;
    const [item, next] = itemLines(lines, end, marker);
    items.push(item);
    if (parseBlocks(item, MAX_DEPTH).filter(({ tag }) => tag === "p").length > 1) loose = true;
    const following = skipBlank(lines, next);
    const more = following < lines.length && listMarker(lines[following]);
    if (more && following > next && more.kind === first.kind) loose = true;
    end = more ? following : next;
  }
  const ordered = !Number.isNaN(first.number);
  const kids = items.map((item) => listItem(item, depth, loose));
  const node = { tag: ordered ? "ol" : "ul", kids };
  if (ordered && first.number !== 1) node.start = first.number;
  return [node, end];
}

/** The lines of one item without its indentation, and the line after it. */
function itemLines(lines, at, marker) {
  const inner = [lines[at].slice(marker.width)];
  const least = Math.min(marker.width, marker.indent + 2);
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (isBlank(line)) {
      const next = skipBlank(lines, end);
      if (next >= lines.length || indentOf(lines[next]) < least) break;
      for (; end < next; end += 1) inner.push("");
      continue;
    }
    if (indentOf(line) >= least) {
      inner.push(stripIndent(line, marker.width));
    } else if (listMarker(line) || interrupts(lines, end)) {
      break;
    } else {
      inner.push(line.trimStart()); // a paragraph may go on without indentation
    }
    end += 1;
  }
  return [inner, end];
}

function listItem(lines, depth, loose) {
  const task = /^\[([ xX])\][ \t]+/.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  let kids = parseBlocks(lines, depth + 1);
  if (!loose) kids = kids.map((kid) => (kid.tag === "p" ? { tag: null, text: kid.text } : kid));
  return task ? { tag: "li", task: task[1] !== " ", kids } : { tag: "li", kids };
}

function skipBlank(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
}

function indentOf(line) {
  let columns = 0;
  for (const character of line) {
    if (character === " ") columns += 1;
    else if (character === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

function stripIndent(line, columns) {
  let at = 0;
  for (let seen = 0; at < line.length && seen < columns; at += 1) {
    if (line[at] === "\t") seen += 4 - (seen % 4);
    else if (line[at] === " ") seen += 1;
    else break;
  }
  return line.slice(at);
}

function startsTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|")) return false;
  if (!TABLE_RULE.test(lines[at + 1])) return false;
  return cells(lines[at]).length === cells(lines[at + 1]).length;
}

function cells(line) {
  const found = [];
  let cell = "";
  for (let at = 0; at < line.length; at += 1) {
    if (line[at] === "\\" && line[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (line[at] === "|") {
      found.push(cell.trim());
      cell = "";
    } else {
      cell += line[at];
    }
  }
  found.push(cell.trim());
  if (found[0] === "") found.shift();
  if (found.length && found[found.length - 1] === "") found.pop();
  return found;
}

function table(lines, at) {
  const align = cells(lines[at + 1]).map((rule) => {
    if (!rule.endsWith(":")) return null;
    return rule.startsWith(":") ? "center" : "right";
  });
  const row = (line, tag) => {
    const texts = cells(line);
    const kids = align.map((side, i) => ({ tag, text: texts[i] ?? "", align: side }));
    return { tag: "tr", kids };
  };
  let end = at + 2;
  const body = [];
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) {
    body.push(row(lines[end], "td"));
    end += 1;
  }
  const kids = [{ tag: "thead", kids: [row(lines[at], "th")] }];
  if (body.length) kids.push({ tag: "tbody", kids: body });
  return [{ tag: "table", kids }, end];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end)) {
    const marker = depth < MAX_DEPTH ? listMarker(lines[end]) : null;
    if (marker && (Number.isNaN(marker.number) || marker.number === 1)) break;
    end += 1;
  }
  return [
    {
      tag: "p",
      text: lines
        .slice(at, end)
        .map((line) => line.trim())
        .join("\n"),
    },
    end,
  ];
}

/** Whether a line ends the paragraph before it, lists aside. */
function interrupts(lines, at) {
  const line = lines[at];
  const begins = [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line));
  return begins || startsTable(lines, at);
}
