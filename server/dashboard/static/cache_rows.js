// The keys and values of one head as they stand in the cache after a step: a row for each token, a column for each number.
// Knows neither the server nor blocks.

import { el, setText } from "./dom.js";
import { largestOf, pixels, signedColours } from "./heat.js";
import { colour, fitCanvas, onThemeChange } from "./theme.js";

const MOST_HEIGHT = 280; // CSS pixels, but for long prompts
const [MIN_ROW, MAX_ROW] = [2, 12];
const KINDS = { rotated_key: "Keys", value: "Values" };

/** Two pictures that grow. */
export class CacheRows {
  constructor() {
    this.tensors = null;
    this.pictures = Object.entries(KINDS).map(([name, title]) => ({
      name,
      title,
      canvas: el("canvas", { class: "cache-rows", role: "img", "data-of": name }),
    }));
    this.told = el("p", { class: "muted small" });
    this.element = el("div", { class: "stack", id: "cache-rows" }, this.told,
      el("div", { class: "columns" }, ...this.pictures.map(({ title, canvas }) => el("div", { class: "strip" }, el("b", {}, title), canvas))));
    new ResizeObserver(() => this.draw()).observe(this.element);
    onThemeChange(() => this.draw());
  }

  /** Takes the tensors of a head; `name` is what it is called. */
  show(tensors, name) {
    this.tensors = tensors;
    this.name = name;
    this.draw();
  }

  /** Shows the first tokens alone; the last `numNew` of them are new. */
  grow(numTokens, numNew) {
    this.numTokens = numTokens;
    this.numNew = numNew;
    this.draw();
  }

  draw() {
    const { tensors, numTokens, numNew } = this;
    if (!tensors || !numTokens) return;
    setText(this.told, `What is in the cache of ${this.name}: a row for each token, a column for each of its ${tensors.headDim} numbers. Rows in the frame are new; the others stay as they were.`);
    for (const { name, title, canvas } of this.pictures) {
      const width = canvas.clientWidth;
      if (!width) continue;
      const rowHeight = Math.min(MAX_ROW, Math.max(MIN_ROW, MOST_HEIGHT / tensors.numTokens));
      const context = fitCanvas(canvas, width, rowHeight * tensors.numTokens);
      const values = tensors.tensors[name];
      const shade = signedColours(largestOf(values));
      context.imageSmoothingEnabled = false;
      context.clearRect(0, 0, width, rowHeight * tensors.numTokens);
      context.drawImage(
        pixels(numTokens, tensors.headDim, (row, column) => shade(values[row * tensors.headDim + column])),
        0, 0, width, rowHeight * numTokens,
      );
      context.lineWidth = 2;
      context.strokeStyle = colour("--text");
      context.strokeRect(1, (numTokens - numNew) * rowHeight + 1, width - 2, Math.max(2, numNew * rowHeight - 2));
      canvas.setAttribute("aria-label", `${title} of ${numTokens} tokens, ${numNew} of them new`);
    }
  }
}
