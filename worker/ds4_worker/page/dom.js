// Small helpers around the DOM. Text always goes in as text: nothing here parses markup.

/** An element with attributes, listeners (`onclick: f`) and children (nodes, strings or null). */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The same for SVG. */
export function drawing(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Puts a text on the clipboard, also where the browser has no clipboard API (plain HTTP). */
export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = element("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  const focused = document.activeElement;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (focused) focused.focus();
  if (!done) throw new Error("the browser refused to copy");
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = element("button", { type: "button", class: "quiet small" }, label);
  button.addEventListener("click", async () => {
    try {
      await copy(text());
      button.textContent = "Copied";
    } catch (error) {
      button.textContent = "Not copied";
      button.title = String(error);
    }
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}
