// A small plot of the last minutes.

import { el, setText, svg } from "./dom.js";
import { clock } from "./format.js";

const MAX_WINDOW_S = 300;
const MIN_WINDOW_S = 60;
const GAP_S = 3;
const WIDTH = 300;
const HEIGHT = 56;
const TOP = 4;

/** Lines over time, each a field of the points. `format` turns a value into text. */
export class Plot {
  constructor({ label, fields, format, least = 1 }) {
    Object.assign(this, { label, fields, format, least });
    this.points = [];
    this.lines = fields.map((_, index) => svg("path", { class: `line line-${index}` }));
    this.area = svg("path", { class: "area" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.picture = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.area, ...this.lines, this.cursor,
    );
    this.reading = el("span", { class: "reading", "aria-hidden": "true" });
    this.element = el("div", { class: "plot" }, this.picture, this.reading);
    this.picture.addEventListener("pointermove", event => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.point(null));
  }

  /** Draw `points`, oldest first; `now` is the right end, in seconds since the epoch. */
  draw(points, now) {
    this.now = now;
    this.points = points.filter(point => point.at > now - MAX_WINDOW_S);
    const first = this.points[0]?.at ?? now;
    this.window = Math.max(MIN_WINDOW_S, now - first);
    const values = this.points.flatMap(point => this.fields.map(field => point[field] ?? 0));
    this.most = Math.max(this.least, ...values);
    this.fields.forEach((field, index) => this.lines[index].setAttribute("d", this.path(field)));
    this.area.setAttribute("d", this.path(this.fields[0], true));
    const last = this.points.at(-1)?.[this.fields[0]];
    const most = this.format(Math.max(0, ...this.points.map(point => point[this.fields[0]] ?? 0)));
    this.picture.setAttribute(
      "aria-label", `${this.label}, last minutes: now ${this.format(last)}, max ${most}`,
    );
    if (this.pointed == null) setText(this.reading, `max ${most}`);
  }

  x(point) {
    return WIDTH * (1 - (this.now - point.at) / this.window);
  }

  /** The path of one field, with gaps where there are no samples. */
  path(field, closed = false) {
    const runs = [];
    let before = null;
    for (const point of this.points) {
      const value = point[field];
      if (value != null) {
        const isNew = before == null || point.at - before > GAP_S;
        if (isNew) runs.push([]);
        const y = HEIGHT - (HEIGHT - TOP) * (value / this.most);
        runs.at(-1).push([this.x(point).toFixed(1), y.toFixed(1)]);
        before = point.at;
      } else {
        before = null;
      }
    }
    return runs.map(run => {
      const line = `M${run.map(pair => pair.join(" ")).join("L")}`;
      return closed ? `${line}V${HEIGHT}H${run[0][0]}Z` : line;
    }).join("");
  }

  /** Show the values under the pointer. */
  point(event) {
    this.pointed = null;
    this.cursor.setAttribute("visibility", "hidden");
    if (event && this.points.length) {
      const box = this.picture.getBoundingClientRect();
      const at = this.now - this.window * (1 - (event.clientX - box.left) / box.width);
      const far = point => Math.abs(point.at - at);
      const found = this.points.reduce((best, point) => (far(point) < far(best) ? point : best));
      this.pointed = found;
      const x = this.x(found).toFixed(1);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
      this.cursor.setAttribute("visibility", "visible");
      const values = this.fields.map(field => this.format(found[field])).join(" / ");
      setText(this.reading, `${clock(found.at)}  ${values}`);
    }
  }
}
