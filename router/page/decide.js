// Typed questions about a text, and the probabilities of their answers.

import { ApiError, request } from "./api.js";
import { byId, el } from "./dom.js";
import { apiHeaders, askForKeys } from "./keys.js";

const KINDS = { noul: "yes or no", choice: "one of", score: "scale" };

let questions = 0;

export function startDecide() {
  byId("decide-add").addEventListener("click", () => addQuestion().querySelector("input").focus());
  byId("decide-form").addEventListener("submit", event => {
    event.preventDefault();
    decide();
  });
  addQuestion();
}

function addQuestion() {
  questions += 1;
  const id = `question-${questions}`;
  const options = el("input", { id: `${id}-options`, placeholder: "options, separated by commas" });
  const kind = el(
    "select", { id: `${id}-kind`, "aria-label": "Kind", onchange: showOptions },
    ...Object.entries(KINDS).map(([value, label]) => el("option", { value }, label)),
  );
  const listed = el("div", { class: "decide-options" }, el("label", { class: "visually-hidden", for: options.id }, "Options"), options);
  const remove = el("button", { type: "button", class: "quiet", onclick: () => row.remove() }, "Remove");
  const row = el(
    "li", {}, el("label", { class: "visually-hidden", for: id }, "Question"), el("input", { id, placeholder: "Question" }),
    kind, listed, remove, el("output", { class: "decide-answer", "aria-live": "polite" }),
  );
  function showOptions() {
    listed.hidden = kind.value === "noul";
  }
  showOptions();
  byId("decide-questions").append(row);
  return row;
}

/** Return the questions of the form by the number of their row. */
function asked() {
  const found = {};
  [...byId("decide-questions").children].forEach((row, number) => {
    const [text, options] = row.querySelectorAll("input");
    const type = row.querySelector("select").value;
    const criteria = options.value.split(",").map(each => each.trim()).filter(Boolean);
    if (text.value.trim()) found[number] = { type, instructions: text.value, ...(type === "noul" ? {} : { criteria }) };
  });
  return found;
}

async function decide() {
  const error = byId("decide-error");
  const send = byId("decide-send");
  error.hidden = true;
  send.disabled = true;
  const rows = [...byId("decide-questions").children];
  rows.forEach(row => row.querySelector("output").replaceChildren());
  try {
    const body = { state: byId("decide-state").value, questions: asked() };
    const answer = await (await request("v1/systemone", { headers: apiHeaders(), body })).json();
    for (const [number, found] of Object.entries(answer.answers)) show(rows[number].querySelector("output"), found);
  } catch (raised) {
    if (raised instanceof ApiError && raised.status === 401) askForKeys(raised.message);
    error.textContent = raised instanceof TypeError ? "Cannot reach the server." : raised.message;
    error.hidden = false;
  }
  send.disabled = false;
}

function show(output, answer) {
  const named = answer.type === "noul" ? { yes: answer.noul, no: 1 - answer.noul } : answer.probabilities;
  const bars = Object.entries(named).map(([name, p]) => el(
    "div", { class: "decide-bar" }, el("span", {}, answer.legend?.[name] ?? name),
    el("meter", { min: 0, max: 1, value: p, "aria-hidden": "true" }), el("span", { class: "muted" }, p.toFixed(3)),
  ));
  const figures = [`labels ${answer.label_mass.toFixed(3)}`];
  if (answer.score !== undefined) figures.unshift(`score ${answer.score.toFixed(2)}`);
  if (answer.confidence !== undefined) figures.unshift(`confidence ${answer.confidence.toFixed(3)}`);
  output.replaceChildren(...bars, el("p", { class: "muted" }, figures.join(", ")));
}
