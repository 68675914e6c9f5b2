// A vector as a strip of coloured cells that pointer and arrow keys go along. Knows nothing of what the numbers are.

import { el, setText } from "./dom.js";
import { largestOf, pixels, signedColours } from "./heat.js";
import { colour, fitCanvas } from "./theme.js";

const HEIGHT = 22; // CSS pixels

/** A strip of numbers: one colour above zero, another below. */
export class Strip {
  constructor(id, name, meaning) {
    this.values = [];
    this.chosen = 0;
    this.canvas = el("canvas", {
      id: `strip-${id}`, tabindex: 0, role: "slider", "aria-label": `${name}, number by number`, "aria-valuemin": 0, "aria-valuenow": 0,
      onpointermove: (event) => this.#choose(Math.floor((event.offsetX / this.canvas.clientWidth) * this.values.length)),
      onfocus: () => this.#choose(this.chosen),
      onkeydown: (event) => this.#onKey(event),
    });
    this.told = el("span", { class: "muted numeric small" });
    this.meaning = el("span", { class: "muted small" }, meaning);
    this.element = el("div", { class: "strip" }, el("div", { class: "head" }, el("span", {}, el("b", {}, name), " ", this.meaning), this.told), this.canvas);
  }

  /** Says what the numbers mean. */
  explain(meaning) {
    setText(this.meaning, meaning);
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
