// The keys that the user enters. They are stored in this tab only.

import { byId } from "./dom.js";

const NAMES = ["api-key", "metrics-key"];
const listeners = [];

const stored = name => sessionStorage.getItem(name) ?? "";

/** Call `listener` whenever the user has entered keys. */
export const onKeys = listener => listeners.push(listener);

export function apiHeaders() {
  return authorization(stored("api-key"));
}

/** The headers for the status: the metrics key, or the API key if there is none. */
export function statusHeaders() {
  return authorization(stored("metrics-key") || stored("api-key"));
}

const authorization = key => (key ? { authorization: `Bearer ${key}` } : {});

/** Ask for keys and show the `reason`. */
export function askForKeys(reason = "") {
  const dialog = byId("keys");
  for (const name of NAMES) byId(name).value = stored(name);
  byId("keys-error").hidden = !reason;
  byId("keys-error").textContent = reason;
  if (!dialog.open) dialog.showModal();
}

export function startKeys() {
  const dialog = byId("keys");
  byId("keys-button").addEventListener("click", () => askForKeys());
  byId("keys-cancel").addEventListener("click", () => dialog.close());
  byId("keys-form").addEventListener("submit", event => {
    event.preventDefault();
    for (const name of NAMES) {
      const key = byId(name).value.trim();
      if (key) sessionStorage.setItem(name, key);
      else sessionStorage.removeItem(name);
    }
    dialog.close();
    for (const listener of listeners) listener();
  });
}
