// The vectors of one token: its row of X, its query, key and value, and how the rotary embedding turns them.
// Each is a strip of coloured cells that pointer and arrow keys go along. Knows neither the server nor attention.

import { el, setText } from "./dom.js";
import { largestOf, pixels, signedColours } from "./heat.js";
import { colour, fitCanvas, onThemeChange } from "./theme.js";

const HEIGHT = 22; // CSS pixels of a strip
const DIAL = 84;
const MAX_DIALS = 8;

/** A strip of numbers: one colour above zero, another below. */
class Strip {
  constructor(id, name, meaning) {
    this.values = [];
    this.chosen = 0;
    this.name = name;
    this.canvas = el("canvas", {
      id: `strip-${id}`, tabindex: 0, role: "slider", "aria-label": `${name}, number by number`, "aria-valuemin": 0, "aria-valuenow": 0,
      onpointermove: (event) => this.#choose(Math.floor((event.offsetX / this.canvas.clientWidth) * this.values.length)),
      onfocus: () => this.#choose(this.chosen),
      onkeydown: (event) => this.#onKey(event),
    });
    this.told = el("span", { class: "muted numeric small" });
    this.element = el("div", { class: "strip" }, el("div", { class: "head" }, el("span", {}, el("b", {}, name), " ", el("span", { class: "muted small" }, meaning)), this.told), this.canvas);
  }

  show(values) {
    this.values = values;
    this.chosen = Math.min(this.chosen, values.length - 1);
    this.largest = largestOf(values);
    this.canvas.setAttribute("aria-valuemax", values.length - 1);
    this.#tell();
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!this.values.length || !width) return;
    const shade = signedColours(this.largest);
    const context = fitCanvas(this.canvas, width, HEIGHT);
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, width, HEIGHT);
    context.drawImage(pixels(1, this.values.length, (_, i) => shade(this.values[i])), 0, 0, width, HEIGHT);
    const cell = width / this.values.length;
    context.lineWidth = 2;
    context.strokeStyle = colour("--text");
    context.strokeRect(this.chosen * cell, 1, Math.max(cell, 3), HEIGHT - 2);
  }

  #onKey(event) {
    const last = this.values.length - 1;
    const moves = { ArrowRight: this.chosen + 1, ArrowUp: this.chosen + 1, ArrowLeft: this.chosen - 1, ArrowDown: this.chosen - 1, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#choose(moves[event.key]);
  }

  #choose(place) {
    if (!this.values.length) return;
    this.chosen = Math.min(this.values.length - 1, Math.max(0, place));
    this.#tell();
    this.draw();
  }

  #tell() {
    const words = `number ${this.chosen} of ${this.values.length}: ${this.values[this.chosen].toPrecision(4)}`;
    setText(this.told, words);
    this.canvas.setAttribute("aria-valuenow", this.chosen);
    this.canvas.setAttribute("aria-valuetext", words);
  }
}

/** The strips of the chosen token, and the dials of its rotation. */
export class VectorView {
  constructor() {
    this.strips = {
      input: new Strip("input", "x", "what the layer knows of this token, normed: its row of X"),
      query: new Strip("query", "q", "x times W_Q: what it looks for"),
      rotated_query: new Strip("rotated_query", "q turned", "with its position in it"),
      key: new Strip("key", "k", "x times W_K: what it offers to be found by"),
      rotated_key: new Strip("rotated_key", "k turned", "with its position in it; this goes into the cache"),
      value: new Strip("value", "v", "x times W_V: what it hands over; this goes into the cache too"),
    };
    this.where = el("p", { id: "rotation" });
    this.dials = el("canvas", { id: "dials", role: "img", "aria-labelledby": "rotation" });
    this.rows = el("tbody");
    this.element = el(
      "div", { class: "stack" },
      ...Object.values(this.strips).map((strip) => strip.element),
      el("p", { class: "muted small" }, "One colour is above zero, the other below, the stronger the larger; each strip has its own scale. Arrow keys go along a strip."),
      el("h3", {}, "How a position gets into a vector"),
      this.where,
      this.dials,
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Pairs and their angles" }, el("table", {}, el("thead", {}, el("tr", {},
        el("th", {}, "Pair"), el("th", { class: "number" }, "Tokens for a full turn"), el("th", { class: "number" }, "Angle here"),
        el("th", { class: "number" }, "q before"), el("th", { class: "number" }, "q after"))), this.rows)),
    );
    const redraw = () => { Object.values(this.strips).forEach((strip) => strip.draw()); this.#drawDials(); };
    new ResizeObserver(redraw).observe(this.element);
    onThemeChange(redraw);
  }

  /** Shows the vectors of a token in a head. */
  show(inspection, layer, tensors, position) {
    for (const name of ["query", "rotated_query", "key", "rotated_key", "value"]) this.strips[name].show(tensors.vector(name, position));
    this.#showRotation(inspection, layer, tensors, position);
  }

  /** Shows a row of X, which comes by itself. */
  showInput(values) {
    this.strips.input.show(values);
  }

  #showRotation(inspection, layer, tensors, position) {
    const rope = inspection.report.ropes[inspection.report.layers[layer].rope];
    const half = rope.frequencies.length;
    const numDials = Math.min(MAX_DIALS, half);
    const pairs = Array.from({ length: numDials }, (_, i) => Math.round((i * (half - 1)) / Math.max(1, numDials - 1)));
    const [before, after] = ["query", "rotated_query"].map((name) => tensors.vector(name, position));
    this.turns = pairs.map((pair) => ({
      pair,
      angle: position * rope.frequencies[pair],
      wavelength: (2 * Math.PI) / rope.frequencies[pair],
      before: [before[pair], before[pair + half]],
      after: [after[pair], after[pair + half]],
    }));
    setText(this.where, [
      `Token ${position} stands at position ${position}. Numbers i and i + ${half} of a query or key are taken as a point in a plane and turned by the position times`,
      `a frequency, which is high for the first pairs and low for the last ones (base ${rope.theta.toLocaleString("en")}).`,
      position === 0 ? "At position 0 nothing turns." : "The grey hand is the pair before, the other one after.",
      "A query and a key then fit by how far apart they stand, whatever stands before both.",
      rope.magnitude === 1 ? "" : `All are made ${rope.magnitude.toFixed(3)} times as long, for a context that was stretched.`,
    ].join(" ").trim());
    const point = ([x, y]) => `${x.toFixed(2)}, ${y.toFixed(2)}`;
    this.rows.replaceChildren(...this.turns.map((turn) => el("tr", {},
      el("td", {}, `${turn.pair} and ${turn.pair + half}`),
      el("td", { class: "number" }, wavelength(turn.wavelength)),
      el("td", { class: "number" }, degrees(turn.angle)),
      el("td", { class: "number" }, point(turn.before)),
      el("td", { class: "number" }, point(turn.after)))));
    this.#drawDials();
  }

  #drawDials() {
    const width = this.dials.clientWidth;
    if (!this.turns || !width) return;
    const columns = Math.max(1, Math.min(this.turns.length, Math.floor(width / DIAL)));
    const context = fitCanvas(this.dials, width, Math.ceil(this.turns.length / columns) * DIAL);
    context.clearRect(0, 0, width, this.dials.height);
    this.turns.forEach((turn, i) => {
      const [x, y] = [(i % columns) * DIAL + DIAL / 2, Math.floor(i / columns) * DIAL + DIAL / 2];
      const radius = DIAL / 2 - 6;
      context.lineWidth = 1;
      context.strokeStyle = colour("--control-line");
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.stroke();
      hand(context, x, y, radius, turn.before, colour("--control-line"), 2);
      hand(context, x, y, radius, turn.after, colour("--heat"), 3);
    });
  }
}

/** A line towards a point, as long as the dial's radius. */
function hand(context, x, y, radius, [across, up], stroke, width) {
  const length = Math.hypot(across, up) || 1;
  context.lineWidth = width;
  context.strokeStyle = stroke;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + (radius * across) / length, y - (radius * up) / length);
  context.stroke();
}

function degrees(angle) {
  const turns = Math.floor(angle / (2 * Math.PI));
  const rest = ((angle % (2 * Math.PI)) * 180) / Math.PI;
  const shown = `${rest.toFixed(rest < 10 && rest > 0 ? 2 : 0)}°`;
  if (turns === 0) return shown;
  return `${turns === 1 ? "1 turn" : `${turns} turns`} and ${shown}`;
}

function wavelength(tokens) {
  return tokens < 100 ? tokens.toFixed(1) : Math.round(tokens).toLocaleString("en");
}
