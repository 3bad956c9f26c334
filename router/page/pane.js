// One conversation with one model. Several panes are shown side by side.

import { ApiError, events, request } from "./api.js";
import { Answer } from "./answer.js";
import { el } from "./dom.js";
import { apiHeaders, askForKeys } from "./keys.js";
import { content, thumbnail } from "./pictures.js";
import { requestFields, systemPrompt } from "./settings.js";

const NEAR_END_PX = 80;

export class Pane {
  /** `onChange` is called when an answer begins or ends, `onModel` when another model is selected,
   * `onEdit(turn, text, urls)` when the user edits a question. */
  constructor({ models, model, onChange, onModel, onEdit, onClose }) {
    Object.assign(this, { onChange, onEdit });
    this.entries = []; // {turn, message, elements, answer}
    this.abort = null;
    this.select = el("select", { "aria-label": "Model", onchange: () => onModel() });
    this.close = el("button", { type: "button", class: "quiet", onclick: () => onClose(this) }, "Remove");
    this.turns = el("div", { class: "turns", tabindex: "0", role: "log", "aria-label": "Conversation" });
    this.element = el("div", { class: "pane" }, el("div", { class: "pane-head" }, this.select, this.close), this.turns);
    this.setModels(models, model);
    this.showEmpty();
  }

  setModels(models, model = this.select.value) {
    this.select.replaceChildren(...models.map(each => {
      const state = each.state === "ready" ? "" : ` (${each.state})`;
      return el("option", { value: each.id }, each.id + state);
    }));
    if (models.some(each => each.id === model)) this.select.value = model;
  }

  get isRunning() {
    return this.abort !== null;
  }

  clear() {
    this.stop();
    this.entries = [];
    this.showEmpty();
  }

  showEmpty() {
    this.turns.replaceChildren(el("p", { class: "empty" }, "Ask a question. The conversation is lost when the tab closes."));
  }

  ask(turn, text, urls) {
    const edit = el("button", { type: "button", class: "quiet", onclick: () => this.onEdit(turn, text, urls) }, "Edit");
    const elements = [
      el("div", { class: "question", role: "article", "aria-label": "Question" }, ...urls.map(thumbnail), text),
      el("div", { class: "question-actions" }, edit),
    ];
    this.add({ turn, message: { role: "user", content: content(text, urls) }, elements });
    return this.run(turn);
  }

  add(entry) {
    if (this.entries.length === 0) this.turns.replaceChildren();
    this.entries.push(entry);
    this.turns.append(...entry.elements);
  }

  /** Remove the first entry for which `isFirst` returns true, and all later ones. */
  cutFrom(isFirst) {
    this.stop();
    const first = this.entries.findIndex(isFirst);
    if (first < 0) return;
    for (const entry of this.entries.splice(first)) entry.elements.forEach(element => element.remove());
    if (this.entries.length === 0) this.showEmpty();
  }

  get messages() {
    const system = systemPrompt();
    const first = system ? [{ role: "system", content: system }] : [];
    return [...first, ...this.entries.map(entry => entry.answer?.message ?? entry.message)];
  }

  /** Request the next answer and stream it into the pane. */
  async run(turn) {
    const fields = requestFields();
    if (!fields) return;
    const body = {
      model: this.select.value, messages: this.messages, stream: true,
      stream_options: { include_usage: true }, ...fields,
    };
    const answer = new Answer();
    const abort = new AbortController();
    this.abort = abort;
    this.add({ turn, answer, elements: [answer.element] });
    this.turns.scrollTop = this.turns.scrollHeight;
    answer.onDraw = () => this.followEnd();
    this.onChange();
    let error = null;
    try {
      await this.read(answer, body, abort.signal);
    } catch (raised) {
      if (!abort.signal.aborted) error = explain(raised);
    }
    if (this.abort === abort) this.abort = null;
    answer.end(error, abort.signal.aborted);
    answer.addActions({ Regenerate: () => this.regenerate(answer) });
    if (answer.calls.length && !error) this.offerResults(turn, answer);
    this.followEnd();
    this.onChange();
  }

  async read(answer, body, signal) {
    const response = await request("v1/chat/completions", { headers: apiHeaders(), body, signal });
    answer.seed = response.headers.get("x-seed");
    let isWhole = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        isWhole = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(200, chunk.error);
      answer.add(chunk);
    }
    if (!isWhole && !signal.aborted) throw new Error("The connection was lost before the answer was complete.");
  }

  regenerate(answer) {
    const entry = this.entries.find(each => each.answer === answer);
    if (!entry) return;
    this.cutFrom(each => each === entry);
    this.run(entry.turn);
  }

  /** Let the user enter the results of the tool calls. */
  offerResults(turn, answer) {
    const inputs = answer.calls.map((call, position) => {
      const input = el("textarea", { rows: 1, placeholder: "result of the tool" });
      answer.callList.children[position].append(el("label", {}, `Result of ${call.name}`, input));
      return input;
    });
    const send = el("button", { type: "button", onclick: () => {
      send.remove();
      inputs.forEach((input, position) => {
        input.disabled = true;
        const message = { role: "tool", tool_call_id: answer.calls[position].id, content: input.value };
        this.entries.push({ turn, message, elements: [] });
      });
      this.run(turn);
    } }, inputs.length > 1 ? "Send results" : "Send result");
    answer.callList.append(send);
  }

  /** Keep the end in view unless the user has scrolled away from it. */
  followEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.turns;
    const grown = scrollHeight - (this.height ?? scrollHeight);
    if (scrollHeight - scrollTop - clientHeight - grown < NEAR_END_PX) this.turns.scrollTop = scrollHeight;
    this.height = scrollHeight;
  }

  stop() {
    this.abort?.abort();
  }
}

function explain(error) {
  if (!(error instanceof ApiError)) {
    return error instanceof TypeError ? "Cannot reach the server." : error.message;
  }
  if (error.status === 401) askForKeys(error.message);
  return error.code ? `${error.message} (${error.code})` : error.message;
}
