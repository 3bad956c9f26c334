// The tokens of an answer, coloured by probability, with their alternatives.

import { el } from "./dom.js";
import { count, percent } from "./format.js";

const LEVELS = [[0.05, "p4"], [0.2, "p3"], [0.5, "p2"], [0.9, "p1"]];

/** Fill `parent` with `tokens`, in the format of OpenAI's `logprobs.content`. */
export function showLogprobs(parent, tokens) {
  const list = el("div", { class: "tokens", role: "group", "aria-label": "Tokens, use the arrow keys" });
  const about = el("div", { class: "alternatives", "aria-live": "polite" });
  const buttons = tokens.map((token, position) => {
    const level = LEVELS.find(([most]) => Math.exp(token.logprob) < most)?.[1] ?? "p0";
    return el("button", {
      type: "button", class: level, tabindex: position ? "-1" : "0", "data-position": position,
      "aria-pressed": "false",
      "aria-label": `${visible(token)} ${percent(Math.exp(token.logprob))}`,
    }, visible(token) + (token.token.endsWith("\n") ? "\n" : ""));
  });
  list.append(...buttons);

  function select(position, isFocused = false) {
    for (const button of list.querySelectorAll('[aria-pressed="true"]')) {
      button.setAttribute("aria-pressed", "false");
      button.tabIndex = -1;
    }
    buttons[position].setAttribute("aria-pressed", "true");
    buttons[position].tabIndex = 0;
    if (isFocused) buttons[position].focus();
    about.replaceChildren(alternatives(tokens[position]));
  }

  const positionOf = event => Number(event.target.closest("button")?.dataset.position ?? -1);
  list.addEventListener("click", event => {
    if (positionOf(event) >= 0) select(positionOf(event), true);
  });
  list.addEventListener("pointerover", event => {
    if (positionOf(event) >= 0) about.replaceChildren(alternatives(tokens[positionOf(event)]));
  });
  list.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = positionOf(event) + step;
    if (!step || !buttons[next]) return;
    event.preventDefault();
    select(next, true);
  });
  about.append(summary(tokens));
  parent.append(list, about);
}

function summary(tokens) {
  const mean = tokens.reduce((sum, { logprob }) => sum + logprob, 0) / tokens.length;
  const perplexity = Math.exp(-mean);
  return el(
    "p", { class: "muted" },
    `${count(tokens.length)} tokens, mean log-probability ${mean.toFixed(3)}, perplexity ${perplexity.toFixed(2)}.`
    + " Select a token to see its alternatives.",
  );
}

function alternatives(token) {
  const others = token.top_logprobs.filter(other => String(other.bytes) !== String(token.bytes));
  const all = [token, ...others].sort((one, other) => other.logprob - one.logprob);
  return el("table", { "aria-label": "Alternatives" }, el("tbody", {}, ...all.map(each => {
    const chance = Math.exp(each.logprob);
    const bar = el("span", { class: "meter", "aria-hidden": "true" }, el("span"));
    bar.firstChild.style.width = `${100 * chance}%`;
    return el(
      "tr", { class: each === token ? "chosen" : "" }, el("td", {}, visible(each)),
      el("td", {}, `${(100 * chance).toFixed(1)} %`), el("td", {}, each.logprob.toFixed(3)), el("td", {}, bar),
    );
  })));
}

/** A token's text with visible whitespace; incomplete characters are shown as bytes. */
function visible({ token, bytes }) {
  if (token.includes("\uFFFD") && bytes) {
    return bytes.map(byte => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
  return token.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
}
