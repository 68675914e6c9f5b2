// A line chart of the last minutes on a canvas. Its values stand in the legend as text, of the moment under the pointer
// or the newest: the picture itself says nothing more. Knows no metric.

import { el, setText } from "./dom.js";
import { duration } from "./format.js";
import { colour, fitCanvas, onThemeChange } from "./theme.js";

const HEIGHT = 132;
const MARGIN = { left: 52, right: 8, top: 8, bottom: 18 };
const MIN_SECONDS = 60; // of the horizontal axis; it grows with what there is to show
const MAX_SECONDS = 300;
const MAX_GAP = 6; // seconds between two moments that a line connects

/** A chart with one line for each of `series` ([{name, colour: "--series-1"}]); `format` writes its values. */
export class LineChart {
  constructor(title, series, format, { max = null } = {}) {
    this.series = series;
    this.format = format;
    this.max = max; // of the vertical axis; null: of the values
    this.points = []; // [time, ...values]; a value may be null
    this.pointer = null; // a time
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.values = series.map(() => el("b", { class: "numeric" }, "–"));
    this.element = el(
      "figure", { class: "card chart" },
      el("figcaption", {}, el("h2", {}, title), el("ul", { class: "legend" }, ...series.map((s, i) => this.#entry(s, i)))),
      this.canvas,
    );
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#unpoint());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    onThemeChange(() => this.draw());
  }

  /** Adds the values of a moment, in the order of the series, and draws. */
  push(time, values) {
    while (this.points.length && this.points[this.points.length - 1][0] >= time) this.points.pop(); // a clock was set back
    this.points.push([time, ...values]);
    while (this.points[0][0] < time - MAX_SECONDS - 5) this.points.shift();
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const context = fitCanvas(this.canvas, width, HEIGHT);
    context.clearRect(0, 0, width, HEIGHT);
    const end = this.points.length ? this.points[this.points.length - 1][0] : 0;
    const top = this.#top();
    const area = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
    const x = (time) => area.right - ((end - time) / this.#span()) * (area.right - area.left);
    const y = (value) => area.bottom - (Math.min(value, top) / top) * (area.bottom - area.top);
    this.#drawAxes(context, area, top, y);
    this.series.forEach((series, i) => this.#drawLine(context, x, y, i + 1, colour(series.colour), area));
    if (this.pointer !== null) this.#drawPointer(context, area, x(this.pointer));
    this.#tell();
  }

  #entry({ name, colour: variable }, i) {
    return el("li", { class: `key${variable}` }, el("span", { class: "swatch", "aria-hidden": "true" }), `${name} `, this.values[i]);
  }

  /** Seconds that the horizontal axis is long. */
  #span() {
    if (!this.points.length) return MIN_SECONDS;
    const seconds = this.points[this.points.length - 1][0] - this.points[0][0];
    return Math.min(MAX_SECONDS, Math.max(MIN_SECONDS, seconds));
  }

  #top() {
    if (this.max !== null) return this.max;
    let most = 0;
    for (const [, ...values] of this.points) for (const value of values) if (value > most) most = value;
    if (most === 0) return 1;
    const power = 10 ** Math.floor(Math.log10(most));
    return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((edge) => edge >= most);
  }

  #drawAxes(context, area, top, y) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("--muted");
    context.strokeStyle = colour("--line");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      const height = Math.round(y(top * part)) + 0.5;
      context.beginPath();
      context.moveTo(area.left, height);
      context.lineTo(area.right, height);
      context.stroke();
      context.textAlign = "right";
      context.fillText(this.format(top * part), area.left - 6, height);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(`${duration(this.#span())} ago`, area.left, HEIGHT - 4);
    context.textAlign = "right";
    context.fillText("now", area.right, HEIGHT - 4);
  }

  #drawLine(context, x, y, place, style, area) {
    context.save();
    context.beginPath();
    context.rect(area.left, 0, area.right - area.left, HEIGHT);
    context.clip();
    context.strokeStyle = style;
    context.lineWidth = 1.75;
    context.beginPath();
    let isDown = false;
    let before = -Infinity;
    for (const point of this.points) {
      const value = point[place];
      isDown &&= point[0] - before <= MAX_GAP;
      before = point[0];
      if (value == null) isDown = false;
      else if (isDown) context.lineTo(x(point[0]), y(value));
      else {
        context.moveTo(x(point[0]), y(value));
        context.lineTo(x(point[0]) + 0.5, y(value)); // so that a lone value is seen
        isDown = true;
      }
    }
    context.stroke();
    context.restore();
  }

  #drawPointer(context, area, x) {
    context.strokeStyle = colour("--muted");
    context.beginPath();
    context.moveTo(x, area.top);
    context.lineTo(x, area.bottom);
    context.stroke();
  }

  #point(event) {
    if (!this.points.length) return;
    const width = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
    const end = this.points[this.points.length - 1][0];
    const wanted = end - (1 - (event.offsetX - MARGIN.left) / width) * this.#span();
    const nearest = (best, [time]) => (Math.abs(time - wanted) < Math.abs(best - wanted) ? time : best);
    this.pointer = this.points.reduce(nearest, end);
    this.draw();
  }

  #unpoint() {
    this.pointer = null;
    this.draw();
  }

  #tell() {
    const wanted = this.pointer ?? this.points[this.points.length - 1]?.[0];
    const point = this.points.find(([time]) => time === wanted);
    this.values.forEach((element, i) => setText(element, this.format(point?.[i + 1])));
  }
}
