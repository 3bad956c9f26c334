// The models and their engines.

import { el, keyed, setText } from "./dom.js";
import { UNKNOWN, bytes, count, percent, rate, seconds } from "./format.js";

const STATES = { ready: "good", loading: "warn", unloaded: "", broken: "bad" };
const BAD_STATES = ["bad", "lost"];

/** The columns of the engines table: a heading and the function that fills a cell. */
const COLUMNS = [
  ["Engine", (cell, engine) => setText(cell, engine.name)],
  ["State", showState],
  ["Requests", showRequests],
  ["Batch", (cell, { rates }) => setText(cell, rate(rates?.batch))],
  ["Tok/s", (cell, { rates }) => setText(cell, rate(rates?.generated))],
  ["Prompt tok/s", (cell, { rates }) => setText(cell, rate(rates?.prompt))],
  ["Prefill", showComputing],
  ["Step time", (cell, { rates }) => setText(cell, seconds(rates?.step_s))],
  ["KV memory", showMemory],
  ["Blocks in RAM", showBlocks],
  ["SSD", showStore],
  ["Cache hits", showPrompts],
  ["Drafts accepted", showDrafts],
  ["Preemptions", (cell, engine) => setText(cell, count(engine.preemptions))],
  ["Restarts", showLosses],
];

export function createModel(model) {
  const head = el(
    "header", {}, el("h2", {}, model.id), el("span", { class: "state" }), el("span", { class: "muted about" }),
  );
  const figures = el("dl", { class: "figures" });
  const headings = COLUMNS.map(([name]) => el("th", { role: "columnheader", scope: "col" }, name));
  const table = el(
    "table", { role: "table", "aria-label": `Engines of ${model.id}` },
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...headings)),
    el("tbody", { role: "rowgroup" }),
  );
  const scroller = el("div", { class: "engines", role: "region", tabindex: "0",
    "aria-label": `Engines of ${model.id}, table` }, table);
  return el("section", { class: "model", "aria-label": model.id }, head, figures, scroller);
}

/** Show a model; `engines` has the figures of all engines, by name. */
export function updateModel(section, model, engines) {
  const [head, figures, scroller] = section.children;
  const [, state, about] = head.children;
  setText(state, model.state);
  state.className = `state ${STATES[model.state]}`;
  setText(about, describe(model));
  const times = model.first_token;
  keyed(figures, [
    ["Tokens/s", rate(model.generated)],
    ["Queued", count(model.queued)],
    ["First token, median", times ? `${seconds(times.p50)}` : UNKNOWN],
    ["First token, p95", times ? seconds(times.p95) : UNKNOWN],
    ["Inter-token latency", seconds(model.between_tokens_s)],
  ], ([name]) => name, ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
  (pair, [, value]) => setText(pair.lastChild, value));
  const own = model.engines.map(name => engines[name]).filter(Boolean);
  scroller.hidden = own.length === 0;
  keyed(scroller.querySelector("tbody"), own, engine => engine.name, createEngine, updateEngine);
}

function describe(model) {
  const words = [];
  if (model.context_length) words.push(`context of ${count(model.context_length)} tokens`);
  if (model.kv_bits) words.push(model.kv_bits === 16 ? "KV cache not quantized" : `${model.kv_bits}-bit KV cache`);
  if (model.aliases.length) words.push(`also named ${model.aliases.join(", ")}`);
  if (model.adapters.length) words.push(`adapters: ${model.adapters.join(", ")}`);
  if (model.reason) words.push(model.reason);
  return words.join(" · ");
}

function createEngine() {
  const cells = COLUMNS.map(([name]) => el("td", { role: "cell", "data-label": name }));
  return el("tr", { role: "row" }, ...cells);
}

function updateEngine(row, engine) {
  COLUMNS.forEach(([, fill], position) => fill(row.children[position], engine));
}

/** Fill an empty cell with the elements of `parts()`; return the cell's elements. */
function partsOf(cell, parts) {
  if (!cell.firstChild) cell.append(...parts());
  return cell.children;
}

function showState(cell, engine) {
  const kind = engine.ready ? "good" : engine.is_lost ? "lost" : engine.trouble ? "warn" : "";
  const [state] = partsOf(cell, () => [el("span", { class: "state" })]);
  state.className = `state ${BAD_STATES.includes(kind) ? "bad" : kind}`;
  setText(state, engine.ready ? "ready" : engine.is_lost ? "lost" : engine.phase);
  cell.title = engine.trouble ?? `last heartbeat ${seconds(engine.silence_s)} ago`;
}

function showRequests(cell, engine) {
  const waiting = engine.waiting ? `, ${count(engine.waiting)} waiting` : "";
  setText(cell, `${count(engine.sequences)} of ${count(engine.max_sequences)}${waiting}`);
}

/** Show the progress of long prompts. The bar stays in the cell, so that the layout does not jump. */
function showComputing(cell, { computing }) {
  const part = computing ? computing.computed / computing.tokens : 0;
  showBar(cell, part, computing ? percent(part) : UNKNOWN);
  cell.title = computing
    ? `${count(computing.computed)} of ${count(computing.tokens)} tokens of ${count(computing.prompts)}`
      + ` ${computing.prompts === 1 ? "prompt" : "prompts"}`
    : "no prompt has been computed for more than a second";
}

function showMemory(cell, engine) {
  showBar(cell, engine.memory_pressure, percent(engine.memory_pressure));
  cell.title = `of ${bytes(engine.memory_limit_bytes)}; MLX uses ${bytes(engine.active_memory_bytes)}`;
}

function showBlocks(cell, { blocks }) {
  showBar(cell, blocks.total ? blocks.used / blocks.total : 0, count(blocks.used));
  cell.title = `${count(blocks.used)} of ${count(blocks.total)} blocks`;
}

function showStore(cell, { ssd }) {
  if (!ssd) {
    cell.replaceChildren(UNKNOWN);
    return;
  }
  if (cell.children.length === 0) cell.replaceChildren();
  const trouble = ssd.state === "ok" ? "" : `, ${ssd.state.replace("_", " ")}`;
  showBar(cell, ssd.limit_bytes ? ssd.bytes / ssd.limit_bytes : 0, bytes(ssd.bytes) + trouble);
  cell.title = `${count(ssd.blocks)} blocks` + (ssd.limit_bytes ? `, limit ${bytes(ssd.limit_bytes)}` : "");
}

function showBar(cell, part, text) {
  const [label, bar] = partsOf(cell, () => [
    el("span", {}), el("span", { class: "meter", "aria-hidden": "true" }, el("span")),
  ]);
  setText(label, text);
  bar.firstChild.style.width = `${100 * Math.min(1, part)}%`;
}

/** Show where prompt tokens came from: in the last minute, or since the start if there were none. */
function showPrompts(cell, engine) {
  const sum = prompts => prompts.ram + prompts.ssd + prompts.computed;
  const isRecent = sum(engine.recent_prompts) > 0;
  const prompts = isRecent ? engine.recent_prompts : engine.prompts;
  const total = sum(prompts);
  const [text, bar] = partsOf(cell, () => [
    el("span"),
    el("span", { class: "meter split", "aria-hidden": "true" },
      el("span", { class: "ram" }), el("span", { class: "ssd" })),
  ]);
  const part = tier => (total ? prompts[tier] / total : 0);
  setText(text, total ? `RAM ${percent(part("ram"))}, SSD ${percent(part("ssd"))}` : UNKNOWN);
  bar.children[0].style.width = `${100 * part("ram")}%`;
  bar.children[1].style.width = `${100 * part("ssd")}%`;
  cell.title = total
    ? `${count(prompts.ram)} tokens from RAM, ${count(prompts.ssd)} from SSD, ${count(prompts.computed)}`
      + ` computed, ${isRecent ? "in the last minute" : "since the engine's start"}`
    : "no prompts yet";
}

function showDrafts(cell, { drafts }) {
  setText(cell, drafts?.drafted ? percent(drafts.accepted / drafts.drafted) : UNKNOWN);
  cell.title = drafts
    ? `${count(drafts.accepted)} of ${count(drafts.drafted)} tokens accepted; ${seconds(Math.max(0, drafts.saved_s))} saved`
    : "no speculative decoding";
}

function showLosses(cell, engine) {
  setText(cell, count(engine.losses));
  cell.title = "number of times the engine was lost";
  cell.classList.toggle("bad", engine.losses > 0);
}
