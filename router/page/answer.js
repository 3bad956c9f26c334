// One answer of a model: collects the chunks of a stream and shows them.

import { copyText, el, setText } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";
import { showLogprobs } from "./logprobs.js";
import { showMarkdown } from "./markdown.js";

const REDRAW_MS = 60;

export class Answer {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.tokens = [];
    this.usage = null;
    this.finish = null;
    this.pieces = 0;
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.thoughtUntil = null;
    this.build();
  }

  build() {
    this.waiting = el("p", { class: "waiting" }, "…");
    this.reasoningSummary = el("summary", {}, "Reasoning");
    this.reasoningText = el("div");
    this.reasoningFold = el("details", { class: "reasoning", hidden: true }, this.reasoningSummary, this.reasoningText);
    this.textElement = el("div", { class: "text" });
    this.callList = el("div");
    this.failure = el("p", { class: "failure", role: "alert", hidden: true });
    this.figures = el("span");
    this.cut = el("span", { class: "cut" });
    this.actions = el("span", { class: "actions" });
    this.stats = el("div", { class: "stats" }, this.figures, this.cut, this.actions);
    this.logprobs = el("div", { class: "logprobs", hidden: true });
    this.element = el(
      "article", { class: "answer", "aria-label": "Answer", "aria-busy": "true" },
      this.waiting, this.reasoningFold, this.textElement, this.callList, this.failure, this.stats, this.logprobs,
    );
  }

  /** This answer as a message of the conversation. */
  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, arguments: given }) => (
        { id, type: "function", function: { name, arguments: given } }
      ));
    }
    return message;
  }

  /** Add one event of the stream. */
  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices ?? [];
    if (!choice) return;
    const { delta } = choice;
    const hasMore = delta.content || delta.reasoning_content || delta.tool_calls;
    if (hasMore) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.pieces += 1;
    }
    this.reasoning += delta.reasoning_content ?? "";
    if (delta.content) this.thoughtUntil ??= this.lastAt;
    this.text += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    this.tokens.push(...(choice.logprobs?.content ?? []));
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.redrawSoon();
  }

  addCall({ index, id, function: part }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }

  redrawSoon() {
    this.timer ??= setTimeout(() => this.redraw(), REDRAW_MS);
  }

  redraw() {
    clearTimeout(this.timer);
    this.timer = null;
    this.waiting.hidden = this.firstAt != null || !this.isRunning;
    this.reasoningFold.hidden = !this.reasoning;
    setText(this.reasoningText, this.reasoning);
    setText(this.reasoningSummary, this.reasoningTitle());
    showMarkdown(this.textElement, this.text);
    this.drawCalls();
    setText(this.figures, this.describe());
    this.onDraw?.();
  }

  reasoningTitle() {
    const tokens = this.usage?.completion_tokens_details?.reasoning_tokens;
    if (this.thoughtUntil == null && this.isRunning) return "Reasoning…";
    const long = ((this.thoughtUntil ?? this.lastAt) - this.firstAt) / 1000;
    return `Reasoning, ${seconds(long)}${tokens ? `, ${count(tokens)} tokens` : ""}`;
  }

  drawCalls() {
    this.calls.forEach((call, position) => {
      let card = this.callList.children[position];
      if (!card) {
        card = el("section", { class: "call", "aria-label": "Tool call" },
          el("header", {}, "Tool call: ", el("code")), el("pre"));
        this.callList.append(card);
      }
      setText(card.querySelector("code"), call.name);
      setText(card.querySelector("pre"), indented(call.arguments));
    });
  }

  get isRunning() {
    return this.element.getAttribute("aria-busy") === "true";
  }

  /** Mark the answer as ended; `error` is the message to show, or null. */
  end(error = null, isStopped = false) {
    this.element.setAttribute("aria-busy", "false");
    this.failure.hidden = !error;
    setText(this.failure, error ?? "");
    const cuts = { length: "max tokens reached" };
    setText(this.cut, isStopped ? "stopped" : error ? "" : cuts[this.finish] ?? "");
    this.redraw();
  }

  /** Add the buttons of a finished answer. */
  addActions(buttons) {
    const add = (label, onclick) => this.actions.append(el("button", { type: "button", class: "quiet", onclick }, label));
    if (this.text) add("Copy", event => copyText(this.text, event.target));
    for (const [label, act] of Object.entries(buttons)) add(label, act);
    if (this.tokens.length) {
      const toggle = el("button", {
        type: "button", class: "quiet", "aria-expanded": "false",
        onclick: () => {
          this.logprobs.hidden = !this.logprobs.hidden;
          toggle.setAttribute("aria-expanded", String(!this.logprobs.hidden));
          if (!this.logprobs.firstChild) showLogprobs(this.logprobs, this.tokens);
        },
      }, "Log-probabilities");
      this.actions.append(toggle);
    }
  }

  /** Return the known figures: timings, token counts, cache. */
  describe() {
    if (this.firstAt == null) return "";
    const words = [`first token ${seconds((this.firstAt - this.startedAt) / 1000)}`];
    const tokens = this.usage?.completion_tokens;
    const made = tokens ?? this.pieces;
    const long = (this.lastAt - this.firstAt) / 1000;
    if (made > 1 && long > 0) words.push(`${rate((made - 1) / long)} tok/s`);
    if (tokens != null) words.push(`${count(tokens)} tokens`);
    if (this.usage) {
      const { prompt_tokens: prompt, prompt_tokens_details: details } = this.usage;
      const cached = details?.cached_tokens ?? 0;
      words.push(`prompt ${count(prompt)}, ${count(cached)} cached (${percent(cached / prompt)})`);
      const drafts = this.usage.completion_tokens_details?.accepted_prediction_tokens;
      if (drafts) words.push(`${count(drafts)} drafted`);
    }
    if (this.seed) words.push(`seed ${this.seed}`);
    return words.join(" · ");
  }
}

/** Return JSON indented, or the text as it is while it is incomplete. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
