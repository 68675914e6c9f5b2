// What becomes of a token's scores in one head: the softmax, number by number, and the values mixed by it.
// Knows neither the server nor the map of all tokens.

import { el, setText } from "./dom.js";
import { visible } from "./inspection.js";
import { Strip } from "./strip.js";
import { onThemeChange } from "./theme.js";

const NUM_TOLD = 6; // tokens that a token looks at most

/** The table of the softmax, and the outcome. */
export class SoftmaxView {
  constructor() {
    this.rows = el("tbody", { id: "softmax" });
    this.table = el("div", { class: "stack" },
      el("table", { class: "softmax" }, el("caption", {}, "The softmax of this row, from where the token looks most"), el("thead", {}, el("tr", {},
        el("th", { colspan: 2 }, "Token"), el("th", { class: "number product" }, "q · k"), el("th", { class: "number" }, "Score"),
        el("th", { class: "number" }, "e^(score − max)"), el("th", { class: "number" }, "Share"),
        el("th", { class: "bars" }, el("span", { class: "unseen" }, "Share, as a bar")))), this.rows),
      el("p", { class: "muted small" }, "The exponential makes every score positive and lets large ones stand out; divided by the sum of all, they are shares of one."));
    this.output = new Strip("output", "z", "the values that this token sees, each times its share, added up");
    this.outcomeTold = el("p");
    this.outcome = el("div", { class: "stack" }, el("h3", {}, "What comes of it"), this.output.element, this.outcomeTold);
    new ResizeObserver(() => this.output.draw()).observe(this.outcome);
    onThemeChange(() => this.output.draw());
  }

  /** Shows a token's row of a head. */
  show(inspection, layer, tensors, from) {
    this.#showRow(inspection, layer, tensors, from);
    this.output.show(tensors.mixed(from));
    this.#tellOutcome(inspection, layer);
  }

  #showRow(inspection, layer, tensors, from) {
    const numSeen = inspection.numSeen(layer, from + 1);
    const seen = Array.from({ length: numSeen }, (_, i) => from + 1 - numSeen + i)
      .map((to) => ({ to, weight: tensors.weight(from, to), product: tensors.product(from, to) }));
    seen.forEach((cell) => { cell.score = inspection.score(cell.product); });
    const largest = Math.max(...seen.map(({ score }) => score));
    seen.forEach((cell) => { cell.power = Math.exp(cell.score - largest); });
    seen.sort((a, b) => b.weight - a.weight);
    const whole = (words) => [el("th", { colspan: 2, scope: "row" }, words)];
    const rows = seen.slice(0, NUM_TOLD).map((cell) => tableRow(
      [el("td", { class: "number" }, cell.to), el("td", {}, el("code", {}, visible(inspection.tokens[cell.to].text)))], [cell], cell.product.toFixed(2), cell.score.toFixed(2)));
    const rest = seen.slice(NUM_TOLD);
    if (rest.length > 0) rows.push(tableRow(whole(rest.length === 1 ? "1 other" : `${rest.length} others`), rest, "", ""));
    if (seen.length > 1) rows.push(tableRow(whole(`all ${seen.length}`), seen, "", ""));
    this.rows.replaceChildren(...rows);
  }

  #tellOutcome({ outline, report }, layer) {
    const { num_q_heads: heads, head_dim: dim, hidden_size: size } = outline;
    setText(this.outcomeTold, [
      `So z holds what this token found in the others. ${heads === 1 ? "The only head's z is" : `The z of all ${heads} heads, side by side, are`} ${heads * dim} numbers;`,
      `W_O [${report.layers[layer].w_o.join(", ")}] makes ${size} of them, which are ${outline.norms_output ? "normed and " : ""}added to the ${size} that stood for the token.`,
      "Here alone tokens learn of each other: then a feed-forward network works on each by itself, and the next layer begins with the sum.",
      "After the last layer, what stands for the last token is compared with every token of the vocabulary: that gives the probabilities of the next one.",
    ].join(" "));
  }
}

/** Cells of one token or of several; `name` is the cells that say which. */
function tableRow(name, cells, product, score) {
  const [power, weight] = ["power", "weight"].map((field) => cells.reduce((sum, cell) => sum + cell[field], 0));
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${100 * Math.min(1, weight)}%`;
  return el("tr", {}, ...name, el("td", { class: "number product" }, product), el("td", { class: "number" }, score),
    el("td", { class: "number" }, power.toFixed(3)), el("td", { class: "number" }, percent(weight)), el("td", { class: "bars" }, bar));
}

/** A share in per cent. */
export function percent(weight) {
  return weight >= 0.0005 || weight === 0 ? `${(100 * weight).toFixed(1)} %` : "less than 0.1 %";
}
