// The messages of the conversation, kept in this browser until they are cleared.

import { call } from "./api.js";
import { ApiError, addChunk, emptyAnswer, errorOf, forRequest, readEvents } from "./stream.js";

const KEPT = "ds4.conversation";

export class Conversation {
  messages = [];

  /** `onTrouble(text)`: the browser refused to keep something. */
  constructor(onTrouble) {
    this.onTrouble = onTrouble;
    try {
      const kept = JSON.parse(localStorage.getItem(KEPT) ?? "[]");
      if (Array.isArray(kept)) this.messages = kept.filter((one) => typeof one?.role === "string");
    } catch (error) {
      onTrouble(`The kept conversation cannot be read: ${error.message}`);
    }
  }

  keep() {
    try {
      if (this.messages.length) localStorage.setItem(KEPT, JSON.stringify(this.messages));
      else localStorage.removeItem(KEPT);
    } catch (error) {
      this.onTrouble(`This conversation is not kept: ${error.message}`);
    }
  }

  add(message) {
    this.messages.push(message);
    this.keep();
  }

  clear() {
    this.messages = [];
    this.keep();
  }

  /** The index of the last message of a person, or -1. */
  get lastQuestion() {
    return this.messages.findLastIndex((message) => message.role === "user");
  }

  /** Forgets a message and all after it. */
  cut(index) {
    this.messages.length = index;
    this.keep();
  }

  /** Messages as a request carries them. */
  forRequest(system) {
    const sent = this.messages.filter(hasSomething).map(forRequest);
    return system.trim() ? [{ role: "system", content: system }, ...sent] : sent;
  }
}

function hasSomething(message) {
  return message.role !== "assistant" || message.content || message.tool_calls?.length;
}

/** Streams one answer. `onChange(message)` after every event that brought something. Gives the
 * message back, with `error` set when it ended badly and `stopped` when `signal` ended it. */
export async function answer(messages, fields, signal, onChange) {
  const message = emptyAnswer();
  const timing = { began: performance.now(), first: null, last: null, pieces: 0 };
  message.timing = timing;
  onChange(message);
  const body = { messages, ...fields, stream: true, stream_options: { include_usage: true } };
  try {
    const response = await call("/v1/chat/completions", { body, signal });
    let complete = false;
    for await (const { event, data } of readEvents(response)) {
      if (event === "error") throw errorOf(0, data);
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      if (addChunk(message, JSON.parse(data))) {
        timing.last = performance.now();
        timing.first ??= timing.last;
        timing.pieces += 1;
      }
      onChange(message);
    }
    if (!complete) throw new ApiError("The answer broke off: its worker is gone.");
  } catch (error) {
    if (signal.aborted) message.stopped = true;
    else
      message.error =
        error instanceof ApiError ? error.message : `The answer broke off: ${error.message}`;
  }
  return message;
}

/** Tokens, tokens per second and seconds to the first, as far as they are known. */
export function pace({ timing, usage }) {
  if (!timing) return {};
  const tokens = usage?.completion_tokens ?? timing.pieces;
  const seconds = timing.first === null ? 0 : (timing.last - timing.first) / 1000;
  return {
    tokens,
    perSecond: seconds > 0.05 && tokens > 1 ? (tokens - 1) / seconds : null,
    firstSeconds: timing.first === null ? null : (timing.first - timing.began) / 1000,
  };
}
