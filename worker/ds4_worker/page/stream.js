// From the bytes of an answer to a message: server-sent events, chat chunks, error bodies.
// Pure but for `readEvents`; runs outside a browser too, for the tests.

/** Splits a stream of text into server-sent events; any split of the text gives the same events. */
export class EventParser {
  #line = "";
  #skipLf = false;
  #event = "";
  #data = [];

  /** The events completed by more text, as {event, data}. Comments are dropped. */
  push(text) {
    const events = [];
    for (const character of text) {
      if (this.#skipLf) {
        this.#skipLf = false;
        if (character === "\n") continue;
      }
      if (character === "\n" || character === "\r") {
        this.#skipLf = character === "\r";
        const done = this.#endLine();
        if (done) events.push(done);
      } else {
        this.#line += character;
      }
    }
    return events;
  }

  #endLine() {
    const line = this.#line;
    this.#line = "";
    if (line === "") {
      const data = this.#data;
      const event = this.#event || "message";
      this.#data = [];
      this.#event = "";
      return data.length ? { event, data: data.join("\n") } : null;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#event = value;
    return null;
  }
}

/** The events of a fetched response, as they come. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

/** What the API says went wrong. `status` 0: the connection, not the API. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** The ApiError of an error body, given as text. */
export function errorOf(status, body) {
  let detail = null;
  try {
    detail = JSON.parse(body)?.error;
  } catch {
    // Not from our server: a proxy's page, perhaps. The status has to do.
  }
  if (!detail || typeof detail.message !== "string")
    return new ApiError(`HTTP ${status}`, { status });
  return new ApiError(detail.message, {
    status,
    code: detail.code ?? null,
    param: detail.param ?? null,
  });
}

export function emptyAnswer() {
  return {
    role: "assistant",
    content: "",
    reasoning_content: "",
    tool_calls: [],
    finish_reason: null,
  };
}

/** Adds one chunk of a streamed chat completion to a message; whether it brought any text. */
export function addChunk(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = (chunk.choices ?? []).find((one) => one.index === 0);
  if (!choice) return false;
  const delta = choice.delta ?? {};
  message.content += delta.content ?? "";
  message.reasoning_content += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) addToolCall(message.tool_calls, part);
  if (choice.finish_reason) message.finish_reason = choice.finish_reason;
  return Boolean(delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls);
}

function addToolCall(calls, part) {
  let call = calls.find((one) => one.index === part.index);
  if (!call) {
    call = { index: part.index, id: "", type: "function", function: { name: "", arguments: "" } };
    calls.push(call);
  }
  if (part.id) call.id = part.id;
  call.function.name += part.function?.name ?? "";
  call.function.arguments += part.function?.arguments ?? "";
}

/** A kept message as the API wants it back. */
export function forRequest(message) {
  const { role, content } = message;
  if (role === "tool") return { role, tool_call_id: message.tool_call_id, content };
  if (role !== "assistant") return { role, content };
  const sent = { role, content };
  if (message.reasoning_content) sent.reasoning_content = message.reasoning_content;
  if (message.tool_calls?.length) {
    sent.tool_calls = message.tool_calls.map(({ id, type, function: f }) => ({
      id,
      type,
      function: f,
    }));
  }
  return sent;
}
