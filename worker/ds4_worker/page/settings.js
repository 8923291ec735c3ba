// What a person may set for the next request, and the request's fields that follow from it.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const THINKING = {
  off: { think: false },
  on: { think: true },
  max: { think: true, reasoning_effort: "max" },
};

/** Fields of a chat request. Empty settings are left out: the model's own values hold.
 * Throws an Error with a sentence for tools that are no JSON array. */
export function requestFields(settings) {
  const fields = {};
  for (const name of NUMBERS) {
    const text = String(settings[name] ?? "").trim();
    if (text !== "" && Number.isFinite(Number(text))) fields[name] = Number(text);
  }
  Object.assign(fields, THINKING[settings.thinking] ?? {});
  const tools = parseTools(settings.tools ?? "");
  if (tools.length) fields.tools = tools;
  return fields;
}

export function parseTools(text) {
  if (text.trim() === "") return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: expected a JSON array, [ ... ]");
  return tools;
}

/** Ties the form to what is stored, both ways. `tell` hears of every change. */
export function bindSettings(form, stored, tell) {
  const fields = [...form.elements].filter((field) => field.name);
  const problem = form.querySelector(".field-error");

  function read() {
    return Object.fromEntries(fields.map((field) => [field.name, field.value]));
  }

  function check(settings) {
    let message = "";
    try {
      parseTools(settings.tools);
    } catch (error) {
      message = error.message;
    }
    problem.textContent = message;
    problem.hidden = !message;
    form.elements.tools.setAttribute("aria-invalid", String(Boolean(message)));
  }

  for (const field of fields) field.value = stored[field.name] ?? "";
  check(read());
  form.addEventListener("input", () => {
    check(read());
    tell(read());
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  return {
    read,
    reset() {
      for (const field of fields) field.value = "";
      check(read());
      tell(read());
    },
  };
}
