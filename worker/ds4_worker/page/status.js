// The status tab: polls /v1/stats while it is shown, and draws what it says.

import { call } from "./api.js";
import { drawing, element } from "./dom.js";

const POLL_MS = 1000;
const KEPT_SAMPLES = 60;
const OWNER = {
  alive: ["good", "alive"],
  gone: ["warn", "gone"],
  replaced: ["bad", "replaced"],
  "": ["", "not watched"],
};

/** The tab's contents. `show(true)` begins polling, `show(false)` ends it. */
export class StatusView {
  #timer = null;
  #shown = false;
  #samples = [];
  #parts = null;
  #trouble;

  constructor(container) {
    this.container = container;
    this.#trouble = element("p", { class: "trouble", role: "status", hidden: true });
    container.append(this.#trouble);
    document.addEventListener("visibilitychange", () => this.#restart());
  }

  show(shown) {
    this.#shown = shown;
    this.#restart();
  }

  #restart() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (this.#shown && document.visibilityState === "visible") this.#poll();
  }

  async #poll() {
    const mine = {};
    this.#timer = mine; // a later call takes the turn away
    try {
      const stats = await (await call("/v1/stats")).json();
      if (this.#timer !== mine) return;
      this.#trouble.hidden = true;
      this.#draw(stats);
    } catch (error) {
      if (this.#timer !== mine) return;
      this.#trouble.textContent = error.message;
      this.#trouble.hidden = false;
      this.#parts?.board.classList.add("stale");
      if (error.status === 401) return; // no key was given: until the tab is opened again
    }
    this.#timer = setTimeout(() => this.#poll(), POLL_MS);
  }

  #draw(stats) {
    this.#parts ??= this.#build();
    const parts = this.#parts;
    parts.board.classList.remove("stale");
    this.#samples.push([stats.tokens.generated_per_second, stats.tokens.prompt_per_second]);
    this.#samples = this.#samples.slice(-KEPT_SAMPLES);
    for (const part of Object.values(parts)) part.update?.(stats, this.#samples);
  }

  #build() {
    const parts = {
      generated: rateCard("Generating", "tokens/s", 0, ({ tokens }) => tokens.generated_per_second),
      prompt: rateCard("Reading prompts", "tokens/s", 1, ({ tokens }) => tokens.prompt_per_second),
      banks: banksCard(),
      pages: meterCard("KV pages", ({ kv_pages: { used, cached, total } }) => [
        used,
        total,
        `${used} of ${total} held, ${cached} kept for reuse`,
      ]),
      places: meterCard("Admitted", ({ places }) => [
        places.used,
        places.total,
        `${places.used} of ${places.total} places taken`,
      ]),
      memory: factsCard("Weights and memory", memoryFacts),
      worker: factsCard("Worker", workerFacts),
      totals: factsCard("Since the start", totalFacts),
    };
    parts.board = element(
      "div",
      { class: "board" },
      ...Object.values(parts).map((part) => part.node),
    );
    this.container.append(parts.board);
    return parts;
  }
}

function card(title, kind, ...children) {
  return element(
    "section",
    { class: `card ${kind}`, "aria-label": title },
    element("h2", {}, title),
    ...children,
  );
}

function rateCard(title, unit, series, read) {
  const figure = element("span", { class: "figure" });
  const line = drawing("path", { class: "line" });
  const area = drawing("path", { class: "area" });
  const ground = drawing("path", { class: "ground", d: `M0,19.5H${KEPT_SAMPLES - 1}` });
  const chart = drawing(
    "svg",
    { viewBox: `0 0 ${KEPT_SAMPLES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" },
    ground,
    area,
    line,
  );
  const top = element("span", { class: "aside" });
  const node = card(title, "rate", element("p", {}, figure, ` ${unit}`), chart, top);
  return {
    node,
    update(stats, samples) {
      const values = samples.map((sample) => sample[series]);
      const most = Math.max(...values, 1);
      const points = values.map(
        (value, i) =>
          `${KEPT_SAMPLES - values.length + i},${(19 - (18 * value) / most).toFixed(2)}`,
      );
      figure.textContent = short(read(stats));
      line.setAttribute("d", `M${points.join("L")}`);
      area.setAttribute(
        "d",
        `M${KEPT_SAMPLES - values.length},20L${points.join("L")}L${KEPT_SAMPLES - 1},20Z`,
      );
      top.textContent = `last minute, at most ${short(Math.max(...values))}`;
    },
  };
}

function banksCard() {
  const squares = element("div", { class: "banks", role: "img" });
  const text = element("p", {});
  return {
    node: card("Banks", "", squares, text),
    update({ banks, sequences }) {
      while (squares.children.length > banks.total) squares.lastChild.remove();
      while (squares.children.length < banks.total) squares.append(element("span", {}));
      [...squares.children].forEach((square, i) => square.classList.toggle("busy", i < banks.used));
      const said = `${banks.used} of ${banks.total} busy`;
      squares.setAttribute("aria-label", said);
      text.textContent = `${said}, ${sequences.waiting} waiting`;
    },
  };
}

function meter(label) {
  const fill = element("span", {});
  const bar = element(
    "div",
    { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0" },
    fill,
  );
  return {
    bar,
    set(used, total, text) {
      bar.setAttribute("aria-valuemax", String(total));
      bar.setAttribute("aria-valuenow", String(used));
      bar.setAttribute("aria-valuetext", text);
      bar.classList.toggle("full", total > 0 && used / total > 0.9);
      fill.style.width = `${total ? Math.min(100, (100 * used) / total) : 0}%`;
    },
  };
}

function meterCard(title, read) {
  const { bar, set } = meter(title);
  const text = element("p", {});
  return {
    node: card(title, "", bar, text),
    update(stats) {
      const [used, total, words] = read(stats);
      set(used, total, words);
      text.textContent = words;
    },
  };
}

function factsCard(title, read) {
  const list = element("dl", {});
  return {
    node: card(title, "facts", list),
    update(stats) {
      const facts = read(stats).filter(([, value]) => value !== null);
      const rows = facts.flatMap(([name, value]) => [
        element("dt", {}, name),
        element("dd", {}, value),
      ]);
      list.replaceChildren(...rows);
    },
  };
}

function memoryFacts({ weights, owner, memory }) {
  const [tone, word] = OWNER[owner.state] ?? ["", owner.state];
  return [
    ["Owner", element("span", { class: `badge ${tone}` }, word)],
    ["Why", owner.detail || null],
    ["Ranges mapped", `${weights.ranges}, ${bytes(weights.bytes)}`],
    ["Of the owner's, in use", bytes(memory.shared_bytes)],
    ["The worker's own", bytes(memory.private_bytes)],
  ];
}

function workerFacts({ model, state, context_tokens: context, uptime_seconds: uptime, pid }) {
  return [
    ["Model", model],
    ["Engine", element("span", { class: `badge ${state === "ok" ? "good" : "bad"}` }, state)],
    ["Context", `${context.toLocaleString("en")} tokens`],
    ["Up", duration(uptime)],
    ["Process", String(pid)],
  ];
}

function totalFacts({ tokens, sequences }) {
  const ends = Object.entries(sequences.finished).filter(([, number]) => number);
  return [
    ["Generated", `${tokens.generated.toLocaleString("en")} tokens`],
    ["Prompts", `${tokens.prompt.toLocaleString("en")} tokens`],
    ["Of prompts reused", `${tokens.prompt_reused.toLocaleString("en")} tokens`],
    [
      "Drafts that came true",
      tokens.draft_offered
        ? `${tokens.draft_accepted.toLocaleString("en")} of ${tokens.draft_offered.toLocaleString("en")}`
        : null,
    ],
    ["Sequences", sequences.submitted.toLocaleString("en")],
    [
      "Ended by",
      ends.length ? ends.map(([reason, number]) => `${reason} ${number}`).join(", ") : null,
    ],
  ];
}

/** A figure with about three digits. */
export function short(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function duration(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(
    Math.floor,
  );
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}
