// Shows Markdown: the nodes of `blocks.js` and `inline.js` as elements made here, one by one.

import { blocks } from "./blocks.js";
import { copyButton, element } from "./dom.js";
import { inline } from "./inline.js";

/** Shows a growing text in an element, making anew only the blocks that changed. */
export class MarkdownView {
  #container;
  #shown = [];

  constructor(container) {
    this.#container = container;
  }

  update(text) {
    const wanted = blocks(text);
    wanted.forEach((block, i) => {
      const old = this.#shown[i];
      if (old && old.tag === block.tag && old.source === block.source) return;
      const node = this.#container.children[i];
      if (old?.tag === "pre" && block.tag === "pre" && old.language === block.language) {
        node.querySelector("code").textContent = block.code; // keeps selection and scrolling
      } else if (node) {
        node.replaceWith(toDom(block));
      } else {
        this.#container.append(toDom(block));
      }
    });
    while (this.#container.children.length > wanted.length) this.#container.lastChild.remove();
    this.#shown = wanted;
  }
}

function toDom(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "pre") return codeBlock(node);
  const kids = (node.kids ?? inline(node.text)).map(toDom);
  if (node.tag === null) {
    const fragment = document.createDocumentFragment();
    fragment.append(...kids);
    return fragment;
  }
  const made = element(
    node.tag,
    { start: node.start, class: node.align && `to-${node.align}` },
    ...kids,
  );
  if (node.tag === "a") {
    made.href = node.href;
    made.target = "_blank";
    made.rel = "noopener noreferrer";
    made.title = node.href;
  }
  if (node.task !== undefined) {
    made.classList.add("task");
    made.prepend(
      element("span", { "aria-label": node.task ? "done" : "to do" }, node.task ? "☑" : "☐"),
      " ",
    );
  }
  if (node.tag === "table") {
    return element(
      "div",
      { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" },
      made,
    );
  }
  return made;
}

function codeBlock({ language, code }) {
  const text = element("code", {}, code);
  return element(
    "figure",
    { class: "code-block" },
    element(
      "figcaption",
      {},
      element("span", {}, language || "code"),
      copyButton(() => text.textContent),
    ),
    element("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" }, text),
  );
}
