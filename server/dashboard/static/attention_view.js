// The attention of one head as a heat map: a row for each token that looks, a column for each that is looked at.
// Pointer and arrow keys go from cell to cell; to a screen reader it is a slider whose value is told in words.

import { el, setText } from "./dom.js";
import { pixels, shareColours } from "./heat.js";
import { visible } from "./inspection.js";
import { SoftmaxView, percent } from "./softmax_view.js";
import { colour, fitCanvas, onThemeChange } from "./theme.js";

const MAX_SIDE = 620; // CSS pixels
const MIN_CELL_WITH_GAPS = 7;
const MIN_CELL_WITH_NAMES = 11;
const NAMES = 72; // CSS pixels beside the map and above it
const MAX_NAME = 9; // characters
const HABITS = {
  first: "to the first token",
  itself: "to the token itself",
  previous: "to the token before",
  repeated: "to what came after the same token before",
};

/** The map with what is told of a cell. `onChoose` is called with the row's position, `onHead` with a layer and a head. */
export class AttentionView {
  constructor(onChoose, onHead) {
    this.onChoose = onChoose;
    this.onHead = onHead;
    this.inspection = null;
    this.tensors = null;
    this.from = 0;
    this.to = 0;
    this.canvas = el("canvas", {
      id: "attention", tabindex: 0, role: "slider", "aria-label": "Attention, cell by cell", "aria-valuemin": 0,
      "aria-valuenow": 0, "aria-describedby": "attention-keys",
      onpointermove: (event) => this.#chooseAt(event),
      onpointerdown: (event) => this.#chooseAt(event),
      onkeydown: (event) => this.#onKey(event),
    });
    this.cell = el("p", { id: "attention-cell" });
    this.row = new SoftmaxView();
    this.habits = el("ul", { class: "row", id: "habits", "aria-label": "Heads that stand out" });
    this.habitsTold = el("p");
    this.scale = el("canvas", { class: "scale", role: "img", "aria-label": "From no attention, at the left, to all of it" });
    this.element = el("div", { class: "stack" }, this.habitsTold, this.habits, el(
      "div", { class: "map" },
      el("div", { class: "map-side" }, this.canvas, this.cell,
        el("div", { class: "row small muted" }, el("span", {}, "0 %"), this.scale, el("span", {}, "100 %"), el("span", {}, "(small ones are drawn stronger: by the square root)")),
        el("p", { id: "attention-keys", class: "muted small" }, "Rows look, columns are looked at. Arrow keys go from cell to cell, Home and End to the ends of a row.")),
      this.row.table,
    ), this.row.outcome);
    new ResizeObserver(() => this.draw()).observe(this.element);
    onThemeChange(() => this.draw());
  }

  /** Shows the tensors of a head, in a token's row, where it looks most. */
  show(inspection, layer, tensors, position) {
    if (inspection !== this.inspection) this.#showHabits(inspection.report.habits);
    this.inspection = inspection;
    this.layer = layer;
    this.tensors = tensors;
    this.canvas.setAttribute("aria-valuemax", tensors.numTokens ** 2 - 1);
    this.#goToBest(position);
  }

  /** Goes to where a token looks most, without calling `onChoose`. */
  chooseRow(position) {
    if (this.tensors && position !== this.from) this.#goToBest(position);
  }

  draw() {
    const width = Math.min(MAX_SIDE, this.canvas.parentElement?.clientWidth ?? 0);
    if (!this.tensors || !width) return;
    const count = this.tensors.numTokens;
    this.margin = (width - NAMES) / count >= MIN_CELL_WITH_NAMES ? NAMES : 0;
    this.size = (width - this.margin) / count;
    this.canvas.style.width = `${width}px`;
    const context = fitCanvas(this.canvas, width, width);
    context.clearRect(0, 0, width, width);
    if (this.margin) this.#drawNames(context, count);
    context.translate(this.margin, this.margin);
    const side = width - this.margin;
    context.imageSmoothingEnabled = false;
    const shade = shareColours();
    // What comes after a token stays empty.
    context.drawImage(pixels(count, count, (from, to) => (to > from ? null : shade(this.tensors.weight(from, to)))), 0, 0, side, side);
    if (this.size >= MIN_CELL_WITH_GAPS) this.#drawGaps(context, count, side);
    this.#drawPromptEnd(context, count);
    context.lineWidth = 2;
    context.strokeStyle = colour("--text");
    context.strokeRect(this.to * this.size, this.from * this.size, Math.max(this.size, 4), Math.max(this.size, 4));
    this.#drawScale();
  }

  /** What each row and each column stands for. */
  #drawNames(context, count) {
    context.font = `12px ${colour("--mono")}`;
    context.textBaseline = "middle";
    for (let position = 0; position < count; position += 1) {
      const name = visible(this.inspection.tokens[position].text).slice(0, MAX_NAME);
      const middle = this.margin + (position + 0.5) * this.size;
      context.fillStyle = colour(position === this.from ? "--text" : "--muted");
      context.textAlign = "right";
      context.fillText(name, this.margin - 4, middle);
      context.fillStyle = colour(position === this.to ? "--text" : "--muted");
      context.textAlign = "left";
      context.save();
      context.translate(middle, this.margin - 4);
      context.rotate(-Math.PI / 2);
      context.fillText(name, 0, 0);
      context.restore();
    }
  }

  #drawGaps(context, count, width) {
    context.fillStyle = colour("--surface");
    for (let line = 1; line < count; line += 1) {
      context.fillRect(line * this.size - 0.5, 0, 1, width);
      context.fillRect(0, line * this.size - 0.5, width, 1);
    }
  }

  /** Rows below the line were computed one at a time, with the cache. */
  #drawPromptEnd(context, count) {
    const row = this.inspection.report.num_prompt_tokens;
    if (row >= count) return;
    context.fillStyle = colour("--warn");
    context.fillRect(0, row * this.size - 1, count * this.size, 2);
  }

  #drawScale() {
    const context = fitCanvas(this.scale, 120, 12);
    const shade = shareColours();
    for (let x = 0; x < 120; x += 1) {
      context.fillStyle = `rgb(${shade(x / 119).join(" ")})`;
      context.fillRect(x, 0, 1, 12);
    }
  }

  #chooseAt(event) {
    if (!this.tensors) return;
    const last = this.tensors.numTokens - 1;
    const [to, from] = [event.offsetX, event.offsetY]
      .map((offset) => Math.min(last, Math.max(0, Math.floor((offset - this.margin) / this.size))));
    this.#choose(from, to);
  }

  #onKey(event) {
    if (!this.tensors) return;
    const { from, to } = this;
    const moves = {
      ArrowRight: [from, to + 1], ArrowLeft: [from, to - 1], ArrowDown: [from + 1, to], ArrowUp: [from - 1, to],
      Home: [from, 0], End: [from, from], PageDown: [from + 10, to], PageUp: [from - 10, to],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const last = this.tensors.numTokens - 1;
    this.#choose(...moves[event.key].map((place) => Math.min(last, Math.max(0, place))));
  }

  #choose(from, to) {
    if (from === this.from && to === this.to) return;
    const isNewRow = from !== this.from;
    this.#go(from, to);
    if (isNewRow) this.onChoose(from);
  }

  #goToBest(position) {
    const from = Math.min(position, this.tensors.numTokens - 1);
    const row = this.tensors.row(from);
    this.#go(from, row.indexOf(Math.max(...row)));
  }

  #go(from, to) {
    [this.from, this.to] = [from, to];
    this.#tell();
    this.draw();
  }

  #tell() {
    const words = this.#words();
    setText(this.cell, words);
    this.canvas.setAttribute("aria-valuenow", this.from * this.tensors.numTokens + this.to);
    this.canvas.setAttribute("aria-valuetext", words);
    this.row.show(this.inspection, this.layer, this.tensors, this.from);
  }

  #showHabits(habits) {
    setText(this.habitsTold, habits.length ? "Every head has learnt to look for something else. With this prompt these stand out, by the share of their attention that goes" : "");
    this.habits.replaceChildren(...habits.map(({ name, layer, head, share }) => el("li", {},
      el("button", { type: "button", "data-head": `${layer}/${head}`, onclick: () => this.onHead(layer, head) },
        `${HABITS[name]}: layer ${layer}, head ${head} (${percent(share)})`))));
  }

  #words() {
    const { from, to, inspection, tensors } = this;
    const [looking, looked] = [inspection.quoted(from), inspection.quoted(to)];
    if (to > from) return `Token ${from}, ${looking}, cannot see token ${to}, ${looked}: it comes later.`;
    const numSeen = inspection.numSeen(this.layer, from + 1);
    if (from - to >= numSeen) return `Token ${from}, ${looking}, does not see token ${to}, ${looked}: this layer looks back ${numSeen} tokens.`;
    const { scale, head_dim: dim, logit_softcap: cap } = inspection.outline;
    const product = tensors.product(from, to);
    const capped = cap ? `, capped to ${inspection.score(product).toFixed(2)}` : "";
    const root = Math.abs(scale * Math.sqrt(dim) - 1) < 1e-6 ? ` (1/√${dim})` : "";
    return [
      `Token ${from}, ${looking}, gives ${percent(tensors.weight(from, to))} of its attention to token ${to}, ${looked}:`,
      `query · key = ${product.toFixed(2)}, times ${Number(scale.toPrecision(3))}${root} is ${(product * scale).toFixed(2)}${capped},`,
      `and the softmax over ${numSeen === 1 ? "1 token" : `${numSeen} tokens`} makes that ${tensors.weight(from, to).toPrecision(3)}.`,
    ].join(" ");
  }
}
