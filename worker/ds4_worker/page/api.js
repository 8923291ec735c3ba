// Calls to this server: the key where one is wanted, errors as ApiError, nothing else.

import { byId } from "./dom.js";
import { ApiError, errorOf } from "./stream.js";

const KEY = "ds4.key"; // in sessionStorage: gone with the tab

/** A response with a good status. Asks for a key on 401. Throws ApiError; AbortError when aborted. */
export async function call(path, options = {}) {
  for (;;) {
    const response = await send(path, options);
    if (response.ok) return response;
    const error = errorOf(response.status, await response.text());
    if (response.status !== 401 || !(await askForKey(error))) throw error;
  }
}

async function send(path, { body, signal }) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const request = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(request, { method: "POST", body: JSON.stringify(body) });
  }
  try {
    return await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. A worker that restarts is back in a moment.");
  }
}

let asking = null;

/** Whether a key was given. One dialog, however many calls wait for it. */
function askForKey(error) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const form = byId("key-form");
    const field = byId("key");
    let given = false;
    field.value = "";
    byId("key-text").textContent = sessionStorage.getItem(KEY)
      ? `${error.message}.`
      : "It is kept until this tab is closed.";
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, field.value);
      given = true;
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      resolve(given);
    };
    dialog.showModal();
  });
  return asking;
}
