// The sizes of what a layer's attention multiplies, and which query heads share a key and value head.
// Knows neither the server nor any number in the tensors.

import { el, setText } from "./dom.js";

/** The tables and the heads. `onHead` is called with a query head that was chosen. */
export class ShapesView {
  constructor(onHead) {
    this.onHead = onHead;
    this.told = el("p");
    this.rows = el("tbody", { id: "shapes" });
    this.sharing = el("p");
    this.groups = el("ul", { class: "head-groups", id: "heads", "aria-label": "Query heads by the key and value head that they share" });
    this.allRows = el("tbody", { id: "all-shapes" });
    this.element = el(
      "div", { class: "stack" },
      this.told,
      scrollable("Shapes in this layer", ["", "Shape", "What it is"], this.rows),
      el("p", { class: "muted small" }, "Matrices W are stored as [outputs, inputs]: X is multiplied with them transposed."),
      this.sharing,
      this.groups,
      el("details", {}, el("summary", {}, "The shapes in every layer"),
        scrollable("Shapes in every layer", ["Layers", "X", "W_Q", "W_K", "W_V", "Q", "K", "V", "W_O", "Sees"], this.allRows)),
    );
  }

  /** Shows a layer, with a head marked. */
  show(inspection, layer, head) {
    const { report, outline } = inspection;
    const shapes = report.layers[layer];
    const [count, size] = shapes.x;
    const dim = outline.head_dim;
    setText(this.told, [
      `In this model ${size} numbers stand for a token.`,
      layer === 0
        ? "Before the first layer they are looked up in a learned table, by the token's number in the vocabulary."
        : `They were looked up in a learned table by the token's number; the ${layer === 1 ? "layer" : `${layer} layers`} before this one added what they found.`,
      `Scaled to a common size (normed), they are the ${count} rows of X. Three learned matrices make three vectors of each row, the same way for every token:`,
      "a query (what am I looking for?), a key (what can I be found by?) and a value (what do I hand over to whoever finds me?).",
      outline.has_bias ? "This model adds a learned constant to each." : "",
      outline.has_norms ? "It norms queries and keys too, head by head, before positions go in." : "",
      shapes.sliding_window === null ? "" : `In this layer a token looks back ${shapes.sliding_window} tokens at most, itself included.`,
    ].filter(Boolean).join(" "));
    const times = (matrix, heads) => `X times ${matrix}, cut into ${heads === 1 ? "1 head" : `${heads} heads`} of ${dim}`;
    const meanings = {
      X: ["x", `${count} tokens, ${size} numbers each`],
      W_Q: ["w_q", "makes queries; learned, the same for all prompts"],
      W_K: ["w_k", "makes keys"],
      W_V: ["w_v", "makes values"],
      Q: ["q", times("W_Q", outline.num_q_heads)],
      K: ["k", `${times("W_K", outline.num_kv_heads)}; kept in the cache, with positions in them`],
      V: ["v", `${times("W_V", outline.num_kv_heads)}; kept in the cache`],
      W_O: ["w_o", "brings together what the heads found: see 4"],
    };
    this.rows.replaceChildren(...Object.entries(meanings).map(([name, [field, meaning]]) => el("tr", {},
      el("th", { scope: "row" }, name), el("td", { class: "mono" }, shapeOf(shapes[field])), el("td", { class: "wrapped" }, meaning))));
    setText(this.sharing, sharing(inspection));
    this.#showGroups(inspection, head);
    this.#showAll(report.layers);
  }

  #showGroups(inspection, head) {
    const { groupSize, outline } = inspection;
    this.groups.replaceChildren(...Array.from({ length: outline.num_kv_heads }, (_, kvHead) => el("li", {},
      el("span", { class: "small muted" }, `K, V head ${kvHead}`),
      el("span", { class: "row" }, ...Array.from({ length: groupSize }, (__, i) => {
        const query = kvHead * groupSize + i;
        return el("button", { type: "button", "aria-pressed": String(query === head), "aria-label": `Query head ${query}`, onclick: () => this.onHead(query) }, `Q ${query}`);
      })))));
  }

  /** Consecutive layers of the same shapes stand in one row. */
  #showAll(layers) {
    const runs = [];
    layers.forEach((shapes, layer) => {
      const words = JSON.stringify(shapes);
      if (runs.at(-1)?.words === words) runs.at(-1).last = layer;
      else runs.push({ words, shapes, first: layer, last: layer });
    });
    this.allRows.replaceChildren(...runs.map(({ shapes, first, last }) => el("tr", {},
      el("td", {}, first === last ? `${first}` : `${first} to ${last}`),
      ...["x", "w_q", "w_k", "w_v", "q", "k", "v", "w_o"].map((field) => el("td", { class: "mono" }, shapeOf(shapes[field]))),
      el("td", {}, shapes.sliding_window === null ? "all before" : `${shapes.sliding_window} tokens`))));
  }
}

function sharing({ groupSize, outline }) {
  const { num_q_heads: queries, num_kv_heads: keys } = outline;
  if (groupSize === 1) return `Each of the ${queries} query heads has a key and value head of its own (multi-head attention). Choose one:`;
  const kind = keys === 1 ? "multi-query attention" : "grouped-query attention";
  return `${groupSize} query heads each share a key and value head (${kind}): the cache holds ${keys === 1 ? "1 head" : `${keys} heads`} instead of ${queries}, and takes ${fraction(groupSize)} of the memory. Choose a query head:`;
}

function fraction(number) {
  return { 2: "half", 3: "a third", 4: "a quarter" }[number] ?? `1/${number}`;
}

function shapeOf(sizes) {
  return `[${sizes.join(", ")}]`;
}

function scrollable(name, columns, body) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name },
    el("table", {}, el("thead", {}, el("tr", {}, ...columns.map((column) => el("th", {}, column)))), body));
}
