// The vectors of one token: its row of X, its query, key and value, and how the rotary embedding turns them.
// Knows neither the server nor attention.

import { el, setText } from "./dom.js";
import { Strip } from "./strip.js";
import { colour, fitCanvas, onThemeChange } from "./theme.js";

const DIAL = 84; // CSS pixels
const CAPTION = 34; // below each
const MAX_DIALS = 8;

/** The strips of the chosen token, and the dials of its rotation. */
export class VectorView {
  constructor() {
    this.strips = {
      input: new Strip("input", "x", "its row of X: what the layer knows of this token"),
      query: new Strip("query", "q", ""),
      rotated_query: new Strip("rotated_query", "q turned", "with its position in it"),
      key: new Strip("key", "k", ""),
      rotated_key: new Strip("rotated_key", "k turned", "with its position in it; this goes into the cache"),
      value: new Strip("value", "v", ""),
    };
    this.title = el("p");
    this.where = el("p", { id: "rotation" });
    this.dials = el("canvas", { id: "dials", role: "img", "aria-labelledby": "rotation" });
    this.rows = el("tbody");
    this.element = el(
      "div", { class: "stack" },
      this.title,
      ...Object.values(this.strips).map((strip) => strip.element),
      el("p", { class: "muted small" }, "Orange is above zero, blue below, the stronger the larger; each strip has its own scale. Arrow keys go along a strip."),
      el("h3", {}, "How a position gets into a vector"),
      this.where,
      this.dials,
      el("details", {}, el("summary", {}, "The same in numbers"),
        el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Pairs and their angles" }, el("table", {}, el("thead", {}, el("tr", {},
          el("th", {}, "Pair"), el("th", { class: "number" }, "Tokens for a full turn"), el("th", { class: "number" }, "Angle here"),
          el("th", { class: "number" }, "q before"), el("th", { class: "number" }, "q after"))), this.rows))),
    );
    const redraw = () => { Object.values(this.strips).forEach((strip) => strip.draw()); this.#drawDials(); };
    new ResizeObserver(redraw).observe(this.element);
    onThemeChange(redraw);
  }

  /** Shows the vectors of a token in a head. */
  show(inspection, layer, tensors, position) {
    const { outline } = inspection;
    const bias = outline.has_bias ? " plus a learned constant" : "";
    const norm = outline.has_norms ? ", normed" : "";
    setText(this.title, `Token ${position}, ${inspection.quoted(position)}, in this layer and head. Another token can be chosen above, or in the map below.`);
    this.strips.query.explain(`x times W_Q${bias}${norm}: what it looks for`);
    this.strips.key.explain(`x times W_K${bias}${norm}: what it can be found by`);
    this.strips.value.explain(`x times W_V${bias}: what it hands over; this goes into the cache too`);
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
    this.half = half;
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
      "The products with W_Q and W_K are made the same way wherever a token stands. A rotary embedding (RoPE) puts its position in.",
      `Numbers i and i + ${half} of q are taken as a point in a plane, and turned by an angle that grows with the position: fast in the first pairs,`,
      `hardly at all in the last ones (base ${rope.theta.toLocaleString("en")}). The same is done to k.`,
      position === 0 ? "At position 0 nothing turns." : "The grey hand is a pair of q before it is turned, the orange one after.",
      "A product of q and k then heeds how far apart the two tokens stand, and not where in the text that is.",
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
    const step = DIAL + CAPTION;
    const context = fitCanvas(this.dials, width, Math.ceil(this.turns.length / columns) * step);
    context.clearRect(0, 0, width, this.dials.height);
    const half = this.half;
    this.turns.forEach((turn, i) => {
      const [x, y] = [(i % columns) * DIAL + DIAL / 2, Math.floor(i / columns) * step + DIAL / 2];
      const radius = DIAL / 2 - 6;
      context.lineWidth = 1;
      context.strokeStyle = colour("--control-line");
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.stroke();
      hand(context, x, y, radius, turn.before, colour("--control-line"), 2);
      hand(context, x, y, radius, turn.after, colour("--heat"), 3);
      context.font = `12px ${colour("--sans")}`;
      context.textAlign = "center";
      context.fillStyle = colour("--muted");
      context.fillText(`${turn.pair} and ${turn.pair + half}`, x, y + DIAL / 2 + 8);
      context.fillStyle = colour("--text");
      context.fillText(degrees(turn.angle), x, y + DIAL / 2 + 24, DIAL - 4);
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
  return turns === 0 ? shown : `${turns} × 360° + ${shown}`;
}

function wavelength(tokens) {
  return tokens < 100 ? tokens.toFixed(1) : Math.round(tokens).toLocaleString("en");
}
