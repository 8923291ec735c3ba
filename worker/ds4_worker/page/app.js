// The page: tabs, settings drawer, composer, and one answer at a time.

import { call } from "./api.js";
import { AnswerView, questionView, resultName, resultView } from "./chat.js";
import { Conversation, answer } from "./conversation.js";
import { byId, copyButton, element } from "./dom.js";
import { bindSettings, requestFields } from "./settings.js";
import { StatusView } from "./status.js";

const SETTINGS = "ds4.settings";
const RETRY_MS = 1000;
const EXAMPLES = [
  "Explain what a memory-mapped file is, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Compare tea and coffee in a table.",
];

const conversation = new Conversation(notice);
const status = new StatusView(byId("status"));
const message = byId("message");
const log = byId("log");
const scroller = byId("scroller");
const touch = matchMedia("(pointer: coarse)").matches;
let running = null; // the AbortController of the answer being written
let pinned = true; // the newest text stays in view

// --- notices

function notice(text, tone = "") {
  const place = byId("notice");
  place.textContent = text;
  place.className = `notice ${tone}`;
  place.hidden = !text;
}

function announce(text) {
  byId("announcer").textContent = text;
}

// --- settings

function storedSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") ?? {};
  } catch {
    return {}; // written by somebody else: the defaults hold
  }
}

const settings = bindSettings(byId("settings-form"), storedSettings(), (values) => {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  } catch (error) {
    notice(`The settings are not kept: ${error.message}`);
  }
});

function showSettings(shown) {
  byId("settings").hidden = !shown;
  byId("shade").hidden = !shown;
  byId("open-settings").setAttribute("aria-expanded", String(shown));
  if (shown) byId("settings-form").elements.system.focus();
  else byId("open-settings").focus();
}

byId("open-settings").addEventListener("click", () => showSettings(byId("settings").hidden));
byId("close-settings").addEventListener("click", () => showSettings(false));
byId("shade").addEventListener("click", () => showSettings(false));
byId("reset-settings").addEventListener("click", () => settings.reset());

// --- the conversation

function draw() {
  const last = conversation.lastQuestion;
  const nodes = conversation.messages.map((one, i) => {
    if (one.role === "user")
      return questionView(one, i === last && !running ? (text) => askAgain(i, text) : null);
    if (one.role === "tool") return resultView(one);
    const view = new AnswerView();
    const final = i === conversation.messages.length - 1;
    view.update(one, { buttons: answerButtons(one, final) });
    if (final) offerResults(view, one);
    return view.node;
  });
  log.replaceChildren(...nodes);
  byId("welcome").hidden = nodes.length > 0;
  byId("clear").disabled = nodes.length === 0;
  const end = conversation.messages.at(-1);
  if (end && end.role !== "assistant" && !running) log.append(unanswered());
}

/** Below a question whose answer never began: the page was closed, or the server refused. */
function unanswered() {
  const button = element("button", { type: "button", class: "outline" }, "Answer this");
  button.addEventListener("click", () => respond());
  return element("div", { class: "foot" }, button);
}

function answerButtons(one, final) {
  const buttons = [];
  if (one.content) buttons.push(copyButton(() => one.content));
  if (final) {
    const again = element(
      "button",
      { type: "button", class: "quiet small" },
      one.error ? "Try again" : "Regenerate",
    );
    again.addEventListener("click", regenerate);
    buttons.push(again);
  }
  return buttons;
}

function offerResults(view, one) {
  if (!one.tool_calls?.length || one.error || one.stopped) return;
  view.askForResults(one.tool_calls, (results) => {
    one.tool_calls.forEach(({ id, function: { name } }, i) => {
      const label = resultName(name, i, results.length);
      conversation.add({ role: "tool", tool_call_id: id, content: results[i], label });
    });
    respond();
  });
}

function ask(text) {
  if (running || !text.trim()) return;
  conversation.add({ role: "user", content: text });
  respond();
}

function askAgain(index, text) {
  conversation.cut(index);
  ask(text);
}

function regenerate() {
  if (running) return;
  const end = conversation.messages.length - 1;
  conversation.cut(conversation.messages[end].role === "assistant" ? end : end + 1);
  respond();
}

/** Lets the model answer the conversation as it stands. */
async function respond() {
  let fields;
  try {
    fields = requestFields(settings.read());
  } catch (error) {
    draw();
    notice(error.message, "bad");
    return;
  }
  notice("");
  const mine = new AbortController();
  running = mine;
  showRunning();
  pinned = true;
  const messages = conversation.forRequest(settings.read().system);
  draw();
  const view = new AnswerView();
  log.append(view.node);
  const show = oncePerFrame((one) => {
    view.update(one, { live: true });
    follow();
  });
  const finished = await answer(messages, fields, mine.signal, show);
  show.cancel();
  if (running !== mine) return; // the conversation was cleared meanwhile
  running = null;
  showRunning();
  if (finished.content || finished.reasoning_content || finished.tool_calls.length)
    conversation.add(finished);
  else if (finished.error) notice(finished.error, "bad");
  draw();
  follow();
  if (!byId("model").textContent) meet();
  announce(finished.error ?? (finished.stopped ? "Stopped" : "The answer is complete"));
  if (!touch) message.focus({ preventScroll: true });
}

/** Calls `function` with the newest value, at most once per frame. */
function oncePerFrame(show) {
  let due = 0;
  let newest;
  const later = (value) => {
    newest = value;
    due ||= requestAnimationFrame(() => {
      due = 0;
      show(newest);
    });
  };
  later.cancel = () => cancelAnimationFrame(due);
  return later;
}

function showRunning() {
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
}

// --- scrolling

function follow() {
  if (pinned) scroller.scrollTop = scroller.scrollHeight;
}

scroller.addEventListener("scroll", () => {
  pinned = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  byId("latest").hidden = pinned;
});
new ResizeObserver(follow).observe(scroller); // a notice or a keyboard may have taken room
byId("latest").addEventListener("click", () => {
  pinned = true;
  follow();
});

// --- the composer

function fit() {
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight + 2, innerHeight * 0.4)}px`;
}

message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && message.value === "") {
    [...log.querySelectorAll(".question .foot button")].at(-1)?.click();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || !message.value.trim()) return;
  const text = message.value;
  message.value = "";
  fit();
  ask(text);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  showRunning();
  conversation.clear();
  notice("");
  draw();
  message.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  if (running) running.abort();
  else if (!byId("settings").hidden) showSettings(false);
});

// --- tabs

const tabs = [byId("tab-chat"), byId("tab-status")];

function select(tab, { focus = false } = {}) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", String(chosen));
    one.tabIndex = chosen ? 0 : -1;
    byId(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  status.show(tab.id === "tab-status");
  history.replaceState(null, "", tab.id === "tab-status" ? "#status" : "#");
  if (tab.id === "tab-chat") follow();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    select(tabs[1 - tabs.indexOf(tab)], { focus: true });
  });
}

// --- the server

/** Waits until the model is there, telling how far it is. */
async function meet() {
  for (;;) {
    try {
      const { data } = await (await call("/v1/models")).json();
      welcome(data[0]);
      notice("");
      return;
    } catch (error) {
      notice(error.message, "waiting");
      if (error.status === 401) return; // asked again with the first message
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function welcome({ id, context_length: context }) {
  const shown = byId("model");
  shown.textContent = id;
  shown.title = id;
  byId("welcome-model").textContent = `${id}, ${context.toLocaleString("en")} tokens of context`;
  document.title = `${id} · ds4`;
}

function examples() {
  const items = EXAMPLES.map((text) => {
    const button = element("button", { type: "button", class: "example" }, text);
    button.addEventListener("click", () => ask(text));
    return element("li", {}, button);
  });
  byId("examples").replaceChildren(...items);
  byId("base-url").textContent = `${location.origin}/v1`;
  const command =
    `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' \\\n` +
    `  -d '{"messages":[{"role":"user","content":"Hello!"}]}'`;
  const code = element(
    "pre",
    { tabindex: "0", "aria-label": "Command" },
    element("code", {}, command),
  );
  byId("curl").replaceChildren(
    element(
      "figure",
      { class: "code-block" },
      element(
        "figcaption",
        {},
        element("span", {}, "shell"),
        copyButton(() => command),
      ),
      code,
    ),
  );
}

examples();
draw();
showRunning();
select(location.hash === "#status" ? tabs[1] : tabs[0]);
if (!touch) message.focus();
meet();
