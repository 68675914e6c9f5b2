// Colours for numbers, as functions from a number to [red, green, blue], and arrays of numbers as small canvases.
// Knows nothing of what the numbers are.

import { el } from "./dom.js";
import { colour, rgb } from "./theme.js";

/** For shares of one: small ones are drawn stronger, by the square root. */
export function shareColours() {
  const [least, most] = [rgb(colour("--raised")), rgb(colour("--heat"))];
  return (share) => mixed(least, most, Math.sqrt(Math.min(1, Math.max(0, share))));
}

/** For numbers from -largest to largest: one colour above zero, another below, the stronger the larger. */
export function signedColours(largest) {
  const [none, above, below] = ["--raised", "--heat", "--cold"].map((name) => rgb(colour(name)));
  return (value) => mixed(none, value > 0 ? above : below, Math.min(1, Math.abs(value) / largest));
}

/** The largest absolute value, or 1 where all are 0. */
export function largestOf(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
}

/** A canvas with a pixel for each cell; `colourAt(row, column)` gives its colour, or null for none. */
export function pixels(rows, columns, colourAt) {
  const image = new ImageData(columns, rows);
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const shown = colourAt(row, column);
      if (shown) image.data.set([...shown, 255], 4 * (row * columns + column));
    }
  }
  const canvas = el("canvas", { width: columns, height: rows });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function mixed(from, to, part) {
  return from.map((value, i) => Math.round(value + (to[i] - value) * part));
}
