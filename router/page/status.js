// The status view.

import { ApiError } from "./api.js";
import { byId, el, keyed, setText } from "./dom.js";
import { clock, count, duration, percent, rate, seconds } from "./format.js";
import { askForKeys } from "./keys.js";
import { createModel, updateModel } from "./models.js";
import { Plot } from "./plot.js";

const KEPT_S = 300;

const TILES = [
  {
    label: "Tokens/s", fields: ["generated"], format: rate, least: 10,
    value: ({ now }) => rate(now.generated),
    detail: ({ now }) => `prompts ${rate(now.prompt)}`,
  },
  {
    label: "Requests", fields: ["running", "queued"], format: count, least: 4,
    value: ({ now }) => count(now.running),
    detail: ({ now }) => `${count(now.queued)} queued`,
  },
  {
    label: "Time to first token", fields: ["first_token"], format: seconds, least: 0.1,
    value: ({ first_token: times }) => seconds(times?.p50),
    detail: ({ first_token: times }) => (times ? `p95 ${seconds(times.p95)}` : "none in the last minute"),
  },
  {
    label: "Batch size", fields: ["batch"], format: rate, least: 4,
    value: ({ now }) => rate(now.batch),
    detail: ({ now }) => (now.batch == null ? "no steps" : "sequences per step"),
  },
  {
    label: "Cache hit rate", fields: ["hit_rate"], format: percent, least: 1,
    value: ({ now }) => percent(now.hit_rate),
    detail: () => "of prompt tokens, last minute",
  },
  {
    label: "KV memory", fields: ["memory_pressure"], format: percent, least: 1,
    value: ({ now }) => percent(now.memory_pressure),
    detail: () => "held by requests",
  },
];

/** Shows the events of the `Feed`. */
export class StatusView {
  constructor() {
    this.points = [];
    this.tiles = TILES.map(tile => {
      const plot = new Plot(tile);
      const value = el("span", { class: "figure" }, "–");
      const detail = el("span", { class: `detail muted lines-${tile.fields.length}` });
      const head = el("p", { class: "tile-head" }, value, detail);
      byId("tiles").append(el("div", { class: "tile" }, el("h2", {}, tile.label), head, plot.element));
      return { ...tile, plot, valueElement: value, detailElement: detail };
    });
  }

  history(points) {
    this.points = points;
  }

  status(status) {
    const { now } = status;
    if (this.points.at(-1)?.at !== now.at) this.points.push(now);
    this.points = this.points.filter(point => point.at > now.at - KEPT_S);
    byId("status-note").hidden = status.reasons.length === 0;
    setText(byId("status-note"), status.reasons.join(" · "));
    this.health(status.status, { ok: "good", degraded: "warn" }[status.status] ?? "bad");
    setText(byId("version"), status.version);
    for (const tile of this.tiles) {
      setText(tile.valueElement, tile.value(status));
      setText(tile.detailElement, tile.detail(status));
      tile.plot.draw(this.points, now.at);
    }
    const update = (section, model) => updateModel(section, model, status.engines);
    keyed(byId("models"), status.models, model => model.id, createModel, update);
    showIncidents(status.incidents);
    setText(byId("facts"), [
      ...batches(status.batches),
      `up ${duration(now.at - status.started)}`,
      `max event loop delay ${seconds(status.loop_lag_s)} in the last minute`,
      `${status.viewers} ${status.viewers === 1 ? "viewer" : "viewers"}`,
    ].join(" · "));
    byId("status").classList.remove("stale");
  }

  lost(error) {
    byId("status").classList.add("stale");
    const note = byId("status-note");
    note.hidden = false;
    if (error instanceof ApiError && [401, 403].includes(error.status)) {
      this.health("key required", "warn");
      const enter = el("button", { type: "button", onclick: () => askForKeys() }, "Enter a key");
      note.replaceChildren(`The status requires a key: ${error.message} `, enter);
      return;
    }
    const isOurs = error instanceof ApiError;
    this.health(isOurs ? "unavailable" : "unreachable", "bad");
    setText(note, isOurs ? error.message : "Cannot reach the server. Retrying.");
  }

  health(text, kind) {
    setText(byId("health"), text.replace("_", " "));
    byId("health").className = `state ${kind}`;
  }
}

/** Return the summary of unfinished batches; empty if there are none. */
function batches({ unfinished, lines, lines_done: done, running }) {
  if (unfinished === 0) return [];
  const what = unfinished === 1 ? "batch" : "batches";
  return [`${count(unfinished)} ${what}: ${count(done)} of ${count(lines)} lines, ${count(running)} running`];
}

function showIncidents(incidents) {
  const keyOf = incident => `${incident.subject} ${incident.what}`;
  const create = () => el(
    "li", {}, el("time", { class: "muted" }), el("span", { class: "subject" }),
    el("span", { class: "what" }), el("span", { class: "times" }), el("code", { class: "muted" }),
  );
  keyed(byId("incident-list"), incidents, keyOf, create, (row, incident) => {
    const [time, subject, what, times, id] = row.children;
    row.className = incident.is_error ? "bad" : "";
    setText(time, clock(incident.at));
    setText(subject, incident.subject);
    setText(what, incident.what);
    setText(times, incident.count > 1 ? `${count(incident.count)} times` : "");
    setText(id, incident.request_id ?? "");
  });
  byId("incidents").classList.toggle("empty", incidents.length === 0);
}
