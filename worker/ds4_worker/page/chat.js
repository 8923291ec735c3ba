// How the conversation looks: one element per message, the last answer growing in place.

import { pace } from "./conversation.js";
import { copyButton, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** One assistant message on the page; `update` shows more of it. */
export class AnswerView {
  #reasoning = null;
  #calls = new Map();
  #content;
  #body;
  #foot;
  #state;

  constructor() {
    this.#content = element("div", { class: "markdown" });
    this.#state = element(
      "p",
      { class: "waiting" },
      element("span", { class: "pulse", "aria-hidden": "true" }),
      "Waiting for the first token",
    );
    this.#body = element("div", { class: "body" }, this.#state, this.#content);
    this.#foot = element("div", { class: "foot" });
    this.node = element(
      "article",
      { class: "answer", "aria-label": "Answer" },
      this.#body,
      this.#foot,
    );
    this.markdown = new MarkdownView(this.#content);
  }

  /** `live`: it is still being written. `buttons`: what can be done with it once it is not. */
  update(message, { live = false, buttons = [] } = {}) {
    this.#showReasoning(message, live);
    this.markdown.update(message.content);
    for (const call of message.tool_calls ?? []) this.#showCall(call);
    const begun = message.content || message.reasoning_content || message.tool_calls?.length;
    this.#state.hidden = !live || Boolean(begun);
    this.node.setAttribute("aria-busy", String(live));
    this.node.classList.toggle("live", live && Boolean(message.content));
    this.#foot.replaceChildren(...footer(message, live), ...(live ? [] : buttons));
  }

  #showReasoning({ reasoning_content: text, content }, live) {
    if (!text) return;
    if (!this.#reasoning) {
      const view = element("div", { class: "markdown" });
      const title = element("summary", {});
      const details = element(
        "details",
        { class: "reasoning", open: live && !content },
        title,
        view,
      );
      this.#body.insertBefore(details, this.#content);
      this.#reasoning = { details, title, markdown: new MarkdownView(view), folded: false };
    }
    const shown = this.#reasoning;
    shown.title.textContent = live && !content ? "Thinking" : "Thought";
    shown.markdown.update(text);
    if (content && !shown.folded) {
      shown.folded = true; // once: a reader who opens it again keeps it open
      shown.details.open = false;
    }
  }

  #showCall(call) {
    let shown = this.#calls.get(call.index);
    if (!shown) {
      const name = element("code", {});
      const text = element("code", {});
      const head = element(
        "div",
        { class: "call-head" },
        element("span", {}, "Calls"),
        name,
        copyButton(() => text.textContent),
      );
      const node = element(
        "section",
        { class: "call", "aria-label": "Tool call" },
        head,
        element("pre", { tabindex: "0", "aria-label": "Arguments" }, text),
      );
      this.#body.append(node);
      shown = { name, text };
      this.#calls.set(call.index, shown);
    }
    shown.name.textContent = call.function.name;
    shown.text.textContent = pretty(call.function.arguments);
  }

  /** A form below the calls that asks for their results; `send(results)` gets one text per call. */
  askForResults(calls, send) {
    const fields = calls.map(() =>
      element("textarea", { rows: "2", class: "code", required: true }),
    );
    const rows = calls.map((call, i) =>
      element("label", {}, resultName(call.function.name, i, calls.length), fields[i]),
    );
    const form = element(
      "form",
      { class: "results" },
      ...rows,
      element("button", { type: "submit", class: "outline" }, "Send results"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      send(fields.map((field) => field.value));
    });
    this.#body.append(form);
  }
}

/** What a result is called; calls of one answer may have the same name. */
export function resultName(name, index, count) {
  return count > 1 ? `Result ${index + 1}, of ${name}` : `Result of ${name}`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being written, or not JSON: as it is
  }
}

const ENDINGS = {
  length: "Ended at the token limit",
  content_filter: "Ended by a filter",
  error: "Ended by an error",
};

function footer(message, live) {
  const parts = [];
  if (message.error) parts.push(element("p", { class: "trouble", role: "alert" }, message.error));
  const { tokens, perSecond, firstSeconds } = pace(message);
  const words = [];
  if (message.stopped) words.push("Stopped");
  else if (!live && ENDINGS[message.finish_reason]) words.push(ENDINGS[message.finish_reason]);
  if (tokens) words.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (perSecond) words.push(`${perSecond.toFixed(1)} tokens/s`);
  if (firstSeconds !== null && firstSeconds !== undefined && !live)
    words.push(`first after ${seconds(firstSeconds)}`);
  const cached = message.usage?.prompt_tokens_details?.cached_tokens;
  if (cached && !live)
    words.push(`${cached} of ${message.usage.prompt_tokens} prompt tokens reused`);
  if (words.length) parts.push(element("p", { class: "pace" }, words.join(" · ")));
  return parts;
}

function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

/** A person's message. `edit(text)`, where given, replaces it and what came after. */
export function questionView(message, edit) {
  const text = element("div", { class: "text" }, message.content);
  const node = element("article", { class: "question", "aria-label": "Your message" }, text);
  if (edit) {
    const button = element("button", { type: "button", class: "quiet small" }, "Edit");
    button.addEventListener("click", () => node.replaceWith(editor(message, edit, node)));
    node.append(element("div", { class: "foot" }, button));
  }
  return node;
}

function editor(message, edit, original) {
  const area = element("textarea", {
    rows: String(Math.min(12, message.content.split("\n").length + 1)),
    "aria-label": "Edit your message",
  });
  area.value = message.content;
  const cancel = element("button", { type: "button", class: "outline" }, "Cancel");
  const send = element("button", { type: "submit", class: "primary" }, "Send again");
  const form = element(
    "form",
    { class: "editor" },
    area,
    element("div", { class: "row" }, cancel, send),
  );
  cancel.addEventListener("click", () => {
    form.replaceWith(original);
    original.querySelector("button").focus();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel.click();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) edit(area.value);
  });
  queueMicrotask(() => area.focus());
  return form;
}

/** The result of a tool, as a person gave it. */
export function resultView(message) {
  return element(
    "article",
    { class: "result", "aria-label": "Tool result" },
    element("span", {}, message.label ?? "Result"),
    element("pre", { tabindex: "0" }, message.content),
  );
}
