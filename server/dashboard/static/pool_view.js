// Draws the block pool on a canvas, one rectangle for each block, be it a device pixel; pointer and keys tell of any.
// To a screen reader it is a slider over the blocks, whose value is told in words. Knows no server.

import { el, setText } from "./dom.js";
import { count } from "./format.js";
import { HELD, SHARED, hueOf } from "./pool_picture.js";
import { colour, fitCanvas, hslToRgb, isDark, onThemeChange, rgb } from "./theme.js";

const STATES = ["free", "cached", "used", "shared"];
const MEANINGS = {
  free: "nothing in them",
  cached: "free, but a prefix in them can still be shared",
  used: "in one block table",
  shared: "in several block tables",
};
const NOTHING_CHOSEN = "Point at a block, or move with the arrow keys.";
const HEIGHT = 300; // CSS pixels; more where blocks would be less than a device pixel
const MAX_CELL = 22;
const DIMMED = 0x48000000; // alpha, the highest of a pixel's four bytes
const MIN_CELL_WITH_GAPS = 4;

/** The pool with its legend. `onOpen` is called with the id of an answer whose block was chosen. */
export class PoolView {
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.picture = null;
    this.byRequest = true;
    this.chosen = null; // a block id
    this.highlighted = null; // the id of an answer whose blocks stand out
    this.blocks = el("canvas"); // all but the mark of the chosen one, which moves with the pointer
    this.numbers = Object.fromEntries(STATES.map((state) => [state, el("b", { class: "numeric" }, "–")]));
    this.canvas = el("canvas", {
      id: "pool", tabindex: 0, role: "slider", "aria-label": "Block", "aria-valuemin": 0, "aria-valuenow": 0, "aria-describedby": "pool-keys",
      onpointermove: (event) => this.#choose(this.#blockAt(event)),
      onclick: () => this.#open(),
      onkeydown: (event) => this.#onKey(event),
      onfocus: () => this.chosen === null && this.#choose(0),
    });
    this.detail = el("p", { id: "pool-detail", class: "small" }, NOTHING_CHOSEN);
    this.summary = el("p", { class: "muted small" });
    this.element = el(
      "section", { class: "card", "aria-labelledby": "pool-title" },
      el("div", { class: "head" }, el("div", { class: "row" }, el("h2", { id: "pool-title" }, "KV block pool"), this.summary), this.#modes()),
      el("ul", { class: "legend" }, ...STATES.map((state) => this.#legend(state))),
      this.canvas,
      this.detail,
      el("p", { id: "pool-keys", class: "muted small" }, "Arrows move by a block or a row, Home and End to the ends; Enter shows the request."),
    );
    new ResizeObserver(() => this.draw()).observe(this.element);
    onThemeChange(() => this.draw());
  }

  /** Shows a PoolPicture; null: nothing is known of the pool. */
  show(picture) {
    this.picture = picture;
    if (picture === null) {
      for (const state of STATES) setText(this.numbers[state], count(null));
      setText(this.detail, NOTHING_CHOSEN);
      this.chosen = null;
      this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
      return;
    }
    for (const state of STATES) setText(this.numbers[state], count(picture.totals[state]));
    setText(this.summary, `${picture.numBlocks.toLocaleString("en")} blocks of ${picture.blockSize} tokens.`);
    this.canvas.setAttribute("aria-valuemax", picture.numBlocks - 1);
    if (this.chosen !== null) this.#tell();
    this.draw();
  }

  /** Lets the blocks of one request stand out; null: of none. */
  highlight(id) {
    this.highlighted = id;
    this.draw();
  }

  draw() {
    const picture = this.picture;
    const width = this.canvas.clientWidth;
    if (!picture || !width) return;
    const ratio = window.devicePixelRatio || 1;
    const ideal = Math.sqrt((width * HEIGHT) / picture.numBlocks);
    this.cell = Math.min(MAX_CELL, Math.max(1 / ratio, Math.floor(ideal * ratio) / ratio));
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const rows = Math.ceil(picture.numBlocks / this.columns);
    this.height = rows * this.cell;
    const context = fitCanvas(this.blocks, width, this.height);
    context.clearRect(0, 0, width, this.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#image(rows), 0, 0, this.columns * this.cell, rows * this.cell);
    if (this.cell >= MIN_CELL_WITH_GAPS) this.#drawGaps(context, rows);
    if (this.byRequest && this.cell >= 2 * MIN_CELL_WITH_GAPS) this.#markShared(context);
    this.#mark();
  }

  /** Puts the blocks on the screen, with a frame around the chosen one. */
  #mark() {
    const width = this.canvas.clientWidth;
    const context = fitCanvas(this.canvas, width, this.height);
    context.clearRect(0, 0, width, this.height);
    context.drawImage(this.blocks, 0, 0, width, this.height);
    if (this.chosen !== null) this.#drawChosen(context);
  }

  #modes() {
    const mode = (name, byRequest) => el(
      "label", { class: "inline" },
      el("input", {
        type: "radio", name: "pool-colours", checked: byRequest === this.byRequest,
        onchange: () => { this.byRequest = byRequest; this.draw(); },
      }),
      name,
    );
    return el("div", { class: "row", role: "radiogroup", "aria-label": "Colour blocks by" }, mode("by request", true), mode("by state", false));
  }

  #legend(state) {
    return el("li", { class: `key--block-${state}` }, el("span", { class: "swatch", "aria-hidden": "true" }), `${state} `, this.numbers[state],
      el("span", { class: "muted" }, ` ${MEANINGS[state]}`));
  }

  /** A pixel for each block. */
  #image(rows) {
    const { picture, columns } = this;
    const image = new ImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const states = STATES.map((state) => packed(rgb(colour(`--block-${state}`))));
    const byFlags = Uint32Array.from({ length: 8 }, (_, flags) =>
      flags & SHARED ? states[3] : flags & HELD ? states[2] : states[flags >> 1]);
    if (this.byRequest) {
      const holders = picture.holders.map((holder) => packed(requestRgb(holder.id)));
      for (let i = 0; i < picture.numBlocks; i += 1) {
        const holder = picture.holderOf[i];
        pixels[i] = holder < 0 ? byFlags[picture.flags[i]] : holders[holder];
      }
    } else {
      for (let i = 0; i < picture.numBlocks; i += 1) pixels[i] = byFlags[picture.flags[i]];
    }
    if (picture.holders.some((holder) => holder.id === this.highlighted)) this.#dimOthers(pixels);
    const canvas = el("canvas", { width: columns, height: rows });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  #dimOthers(pixels) {
    const bright = packed(requestRgb(this.highlighted));
    for (let i = 0; i < this.picture.numBlocks; i += 1) pixels[i] = (pixels[i] & 0x00ffffff) | DIMMED;
    for (const holder of this.picture.holders) {
      if (holder.id === this.highlighted) for (const blockId of holder.blockIds) pixels[blockId] = bright;
    }
  }

  #drawGaps(context, rows) {
    context.fillStyle = colour("--surface");
    for (let column = 1; column <= this.columns; column += 1) context.fillRect(column * this.cell - 1, 0, 1, rows * this.cell);
    for (let row = 1; row <= rows; row += 1) context.fillRect(0, row * this.cell - 1, this.columns * this.cell, 1);
  }

  #markShared(context) {
    context.fillStyle = colour("--surface");
    const size = this.cell / 3;
    this.picture.flags.forEach((flags, i) => {
      if (flags & SHARED) context.fillRect(...this.#corner(i).map((edge) => edge + size - 0.5), size, size);
    });
  }

  #drawChosen(context) {
    const [left, top] = this.#corner(this.chosen);
    const size = Math.max(this.cell, 6);
    context.lineWidth = 2;
    context.strokeStyle = colour("--text");
    context.strokeRect(left - (size - this.cell) / 2, top - (size - this.cell) / 2, size, size);
  }

  #corner(blockId) {
    return [(blockId % this.columns) * this.cell, Math.floor(blockId / this.columns) * this.cell];
  }

  #blockAt(event) {
    const column = Math.min(this.columns - 1, Math.floor(event.offsetX / this.cell));
    const blockId = Math.floor(event.offsetY / this.cell) * this.columns + column;
    return this.picture && blockId >= 0 && blockId < this.picture.numBlocks ? blockId : null;
  }

  #onKey(event) {
    if (!this.picture) return;
    const last = this.picture.numBlocks - 1;
    const from = this.chosen ?? 0;
    const moves = {
      ArrowRight: from + 1, ArrowLeft: from - 1, ArrowDown: from + this.columns, ArrowUp: from - this.columns, Home: 0, End: last,
    };
    if (event.key === "Enter") this.#open();
    else if (!(event.key in moves)) return;
    else this.#choose(Math.min(last, Math.max(0, moves[event.key])));
    event.preventDefault();
  }

  #choose(blockId) {
    if (blockId === null || blockId === this.chosen || !this.picture) return;
    this.chosen = blockId;
    this.#tell();
    this.#mark();
  }

  #tell() {
    this.chosen = Math.min(this.chosen, this.picture.numBlocks - 1);
    const words = this.picture.describe(this.chosen);
    setText(this.detail, words);
    this.canvas.setAttribute("aria-valuenow", this.chosen);
    this.canvas.setAttribute("aria-valuetext", words);
  }

  #open() {
    const [use] = this.chosen === null ? [] : this.picture.uses(this.chosen);
    if (use) this.onOpen(use.holder.id);
  }
}

/** The colour of a request, wherever it is shown. */
export function requestColour(id) {
  return `rgb(${requestRgb(id).join(" ")})`;
}

function requestRgb(id) {
  return isDark() ? hslToRgb(hueOf(id), 0.62, 0.66) : hslToRgb(hueOf(id), 0.6, 0.46);
}

function packed([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
