// Settings of the chat's requests. They are kept in this tab only.

import { byId, el } from "./dom.js";

const STORED = "chat-settings";

const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city"],
    },
  },
}];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, year: { type: "integer" } },
  required: ["name", "year"],
  additionalProperties: false,
};

const number = (name, label, limits) => ({ name, label, kind: "number", limits });
const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", rows: 3 },
  number("temperature", "Temperature", { min: 0, max: 2, step: 0.1 }),
  number("top_p", "Top p", { min: 0, max: 1, step: 0.05 }),
  number("top_k", "Top k", { min: 0, step: 1 }),
  number("min_p", "Min p", { min: 0, max: 1, step: 0.01 }),
  number("max_tokens", "Max tokens", { min: 1, step: 1 }),
  number("seed", "Seed", { min: 0, step: 1, placeholder: "random" }),
  number("repetition_penalty", "Repetition penalty", { min: 0, step: 0.05 }),
  { name: "thinking", label: "Reasoning", kind: "choice", choices: { "": "model default", on: "on", off: "off" } },
  number("thinking_budget", "Max reasoning tokens", { min: 0, step: 1 }),
  { name: "stop", label: "Stop sequences, one per line", kind: "text", rows: 1 },
  { name: "logprobs", label: "Show log-probabilities", kind: "check" },
  { name: "tools", label: "Tools (JSON)", kind: "json", example: EXAMPLE_TOOLS },
  {
    name: "tool_choice", label: "Tool choice", kind: "choice",
    choices: { "": "auto", required: "required", none: "none" },
  },
  { name: "schema", label: "Response JSON schema", kind: "json", example: EXAMPLE_SCHEMA },
];

const inputs = {};

export function startSettings() {
  const form = byId("settings-form");
  const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
  for (const field of FIELDS) {
    const id = `setting-${field.name}`;
    inputs[field.name] = input(field, id);
    form.append(row(field, id));
    if (field.kind === "check") inputs[field.name].checked = Boolean(stored[field.name]);
    else inputs[field.name].value = stored[field.name] ?? "";
  }
  form.addEventListener("input", store);
  form.addEventListener("submit", event => event.preventDefault());
  byId("settings").open = matchMedia("(min-width: 861px)").matches;
}

function input({ kind, limits, rows, choices }, id) {
  if (kind === "number") return el("input", { id, type: "number", placeholder: "model default", ...limits });
  if (kind === "check") return el("input", { id, type: "checkbox" });
  if (kind === "choice") {
    return el("select", { id }, ...Object.entries(choices).map(([value, label]) => el("option", { value }, label)));
  }
  const isJson = kind === "json";
  const about = isJson ? { class: "code", spellcheck: "false", "aria-describedby": `${id}-error` } : {};
  return el("textarea", { id, rows: rows ?? 3, ...about });
}

function row({ name, label, kind, example }, id) {
  const control = inputs[name];
  if (kind === "check") return el("div", { class: "wide check" }, control, el("label", { for: id }, label));
  const caption = el("label", { for: id }, label);
  if (kind !== "json") {
    return el("div", { class: kind === "text" || name === "tool_choice" ? "wide" : "" }, caption, control);
  }
  const insert = el("button", {
    type: "button", class: "quiet", "aria-label": `Insert example: ${label}`,
    onclick: () => {
      control.value = JSON.stringify(example, null, 2);
      control.rows = 8;
      store();
    },
  }, "Example");
  const error = el("p", { id: `${id}-error`, class: "error", hidden: true });
  return el("div", { class: "wide" }, el("div", { class: "label-row" }, caption, insert), control, error);
}

function store() {
  const values = {};
  for (const { name, kind } of FIELDS) {
    values[name] = kind === "check" ? inputs[name].checked : inputs[name].value;
    if (kind === "json") parseJson(name);
  }
  sessionStorage.setItem(STORED, JSON.stringify(values));
}

/** Return the JSON in a field, or null if it is empty. Show an error and return undefined if it is invalid. */
function parseJson(name) {
  const field = inputs[name];
  const error = byId(`${field.id}-error`);
  let found = null;
  try {
    if (field.value.trim()) found = JSON.parse(field.value);
    error.hidden = true;
  } catch (wrong) {
    error.textContent = wrong.message;
    error.hidden = false;
    found = undefined;
  }
  field.setAttribute("aria-invalid", String(found === undefined));
  return found;
}

/** Return the fields of a request, or null after showing an error. */
export function requestFields() {
  const tools = parseJson("tools");
  const schema = parseJson("schema");
  if (tools === undefined || schema === undefined) {
    byId("settings").open = true;
    inputs[tools === undefined ? "tools" : "schema"].focus();
    return null;
  }
  const fields = {};
  for (const { name, kind } of FIELDS) {
    if (kind === "number" && inputs[name].value !== "") fields[name] = Number(inputs[name].value);
  }
  const stop = inputs.stop.value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (inputs.thinking.value) fields.chat_template_kwargs = { enable_thinking: inputs.thinking.value === "on" };
  if (inputs.logprobs.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  if (tools) fields.tools = Array.isArray(tools) ? tools : [tools];
  if (tools && inputs.tool_choice.value) fields.tool_choice = inputs.tool_choice.value;
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return fields;
}

export const systemPrompt = () => inputs.system.value;
