// The KV cache growing step by step: what a step computes, writes, reads, and which token it leads to.
// A slider goes from step to step. Does not know the server.

import { CacheRows } from "./cache_rows.js";
import { el, setText } from "./dom.js";
import { bytes } from "./format.js";
import { quoted, visible } from "./inspection.js";

/** The cache of one inspection. */
export class CacheView {
  constructor() {
    this.inspection = null;
    this.slider = el("input", { type: "range", id: "step", min: 0, step: 1, value: 0, oninput: () => this.#show(Number(this.slider.value)) });
    this.back = el("button", { type: "button", id: "step-back", onclick: () => this.#show(this.step - 1) }, "Back");
    this.next = el("button", { type: "button", id: "step-next", onclick: () => this.#show(this.step + 1) }, "Next");
    this.told = el("div", { class: "stack", id: "step-told", role: "status" });
    this.facts = el("dl", { class: "facts", id: "step-facts" });
    this.layer = 0;
    this.pool = el("div", { class: "kv-pool", id: "kv-pool", role: "img" });
    this.windowKey = legend("kept", "in the cache, and before this layer's window");
    this.serverTold = el("p", { id: "server-pool" });
    this.blocks = el("ol", { class: "kv-blocks", id: "kv-blocks", "aria-label": "Blocks of the cache and the tokens in their slots" });
    this.rows = new CacheRows();
    this.candidates = el("tbody", { id: "candidates" });
    this.element = el(
      "div", { class: "stack" },
      el("div", { class: "row" }, el("label", { class: "grow" }, el("span", { id: "step-name" }, "Step"), this.slider), this.back, this.next),
      this.told,
      el("h3", {}, "The pool"),
      el("ul", { class: "legend" }, legend("ours", "ours: its place in the block table", "kv-block"), legend("others", "held by other sequences", "kv-block"), legend("", "free", "kv-block")),
      this.pool,
      el("h3", {}, "The block table, and the slots of its blocks"),
      el("ul", { class: "legend" }, legend("read", "read in this step"), this.windowKey, legend("new", "written in this step"), legend("", "empty")),
      this.blocks,
      el("div", { class: "columns" }, this.facts,
        el("table", {}, el("caption", {}, "What could come next; the likeliest is taken"), this.candidates)),
      this.rows.element,
      el("h3", {}, "What blocks are good for"),
      this.serverTold,
    );
  }

  /** Shows an inspection from its first step on. */
  show(inspection) {
    this.inspection = inspection;
    this.slider.max = inspection.steps.length - 1;
    setText(this.serverTold, tellServer(inspection));
    this.#show(0);
  }

  /** Shows the keys and values of a head of a layer; `name` is what it is called. */
  showHead(layer, tensors, name) {
    this.layer = layer;
    this.rows.show(tensors, name);
    this.#show(this.step);
  }

  #show(index) {
    this.step = Math.min(this.inspection.steps.length - 1, Math.max(0, index));
    this.slider.value = this.step;
    this.back.disabled = this.step === 0;
    this.next.disabled = this.step === this.inspection.steps.length - 1;
    const cost = this.inspection.costOf(this.step);
    const name = `Step ${this.step + 1} of ${this.inspection.steps.length}`;
    setText(this.element.querySelector("#step-name"), name);
    this.slider.setAttribute("aria-valuetext", name);
    this.told.replaceChildren(...(this.step === 0 ? this.#tellPrompt(cost) : this.#tellToken(cost)).map((text) => el("p", {}, text)));
    this.#showFacts(cost);
    this.#showPool();
    this.#showBlocks(cost);
    this.rows.grow(cost.end, cost.rows);
    this.#showCandidates();
  }

  #tellPrompt(cost) {
    const { outline } = this.inspection;
    return [
      `The whole prompt goes through the model at once (prefill): each layer computes queries, keys and values of ${tokens(cost.rows)} in one product, ` +
        `and each head compares ${cost.rows} queries with ${cost.rows} keys.`,
      "Keys and values are kept, since every later token will look back at them. Queries are not: nobody ever asks for an old question again.",
      `In a head: Q [${cost.rows}, ${outline.head_dim}] times K transposed [${outline.head_dim}, ${cost.rows}] gives scores [${cost.rows}, ${cost.rows}], ` +
        `of which those on and below the diagonal count${this.#windowed(cost.end) ? ` and, in this layer, of each row only the last ${this.#numSeen(cost.end)}` : ""}; their softmax times V [${cost.rows}, ${outline.head_dim}] gives [${cost.rows}, ${outline.head_dim}].`,
    ];
  }

  #tellToken(cost) {
    const { outline } = this.inspection;
    const position = cost.end - 1;
    const { place, block, slot } = this.inspection.placeOf(position);
    const numSeen = this.#numSeen(cost.end);
    return [
      `Only the newest token, ${this.inspection.quoted(position)} at position ${position}, goes through the model (decode): in each layer one row of Q, one of K, one of V. ` +
        `The keys and values of ${tokens(numSeen - 1)} before it are read from the cache, and not computed again${this.#windowed(cost.end) ? `: layer ${this.layer} looks back no further` : ""}.`,
      `Its own key and value go into slot ${slot} of block ${block}, which is at place ${place} of the block table${slot === 0 ? " and had to be taken from the pool for it" : ""}.`,
      `In a head: q [1, ${outline.head_dim}] times K transposed [${outline.head_dim}, ${numSeen}] gives ${numSeen === 1 ? "1 score" : `${numSeen} scores`}; their softmax times V [${numSeen}, ${outline.head_dim}] gives [1, ${outline.head_dim}].`,
    ];
  }

  #showFacts(cost) {
    const { report } = this.inspection;
    const numBlocks = this.inspection.steps[this.step].num_blocks;
    const saved = cost.recomputed / cost.end;
    const facts = {
      "Rows of Q, K and V computed, in each layer": `${cost.rows}, and ${cost.rowsWithoutCache} without a cache`,
      "So far": `${cost.end}, and ${cost.recomputed} without a cache${saved >= 1.05 ? `: ${saved.toFixed(1)} times as many` : ""}`,
      "A token takes in each layer": `${exact(report.served.bytes_per_token_per_layer)} (${report.served.dtype})`,
      "Written in this step": `${exact(cost.writtenPerLayer)} in each layer, ${bytes(cost.written)} in all`,
      "Read in this step": cost.read ? `${bytes(cost.read)} in all layers` : "nothing: there was nothing before",
      "The cache holds": `${bytes(cost.held)} in ${numBlocks === 1 ? "1 block" : `${numBlocks} blocks`} of ${tokens(report.block_size)}; ${numBlocks * report.block_size - cost.end} slots are empty`,
    };
    this.facts.replaceChildren(...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  /** Each block of the pool: ours with its place in the table, those of others, those that are free. */
  #showPool() {
    const { report, steps } = this.inspection;
    const held = report.block_ids.slice(0, steps[this.step].num_blocks);
    const others = new Set(report.other_block_ids);
    this.pool.replaceChildren(...Array.from({ length: report.num_pool_blocks }, (_, block) => {
      const place = held.indexOf(block);
      const kind = place >= 0 ? "ours" : others.has(block) ? "others" : "";
      return el("span", { class: `kv-block ${kind}` }, el("small", {}, block), el("b", {}, place >= 0 ? `→ ${place}` : ""));
    }));
    this.pool.setAttribute("aria-label", `A pool of ${report.num_pool_blocks} blocks. Ours, in the order of the block table: ${held.join(", ")}`);
  }

  #showBlocks(cost) {
    const { report, steps } = this.inspection;
    const firstSeen = cost.end - this.#numSeen(cost.end);
    this.windowKey.hidden = !this.#windowed(cost.end) || this.step === 0;
    const step = steps[this.step];
    this.blocks.replaceChildren(...report.block_ids.slice(0, step.num_blocks).map((block, place) => {
      const slots = Array.from({ length: report.block_size }, (_, slot) => {
        const position = place * report.block_size + slot;
        if (position >= cost.end) return el("li", { class: "kv-slot" }, "");
        const kind = position >= step.first_position ? "new" : position >= firstSeen ? "read" : "kept";
        return el("li", { class: `kv-slot ${kind}`, title: `position ${position}: ${this.inspection.quoted(position)}` }, visible(report.tokens[position].text));
      });
      return el("li", {}, el("span", { class: "small" }, `place ${place}: `, el("b", {}, `block ${block}`)), el("ol", { class: "kv-slots" }, ...slots));
    }));
  }

  #showCandidates() {
    const { candidates } = this.inspection.steps[this.step];
    this.candidates.replaceChildren(...candidates.map((candidate) => {
      const bar = el("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${100 * candidate.probability}%`;
      return el("tr", {}, el("td", {}, el("code", {}, quoted(candidate.text))), el("td", { class: "number" }, `${(100 * candidate.probability).toFixed(1)} %`),
        el("td", { class: "bars" }, bar));
    }));
  }

  /** Tokens that the newest one sees in the layer that is shown. */
  #numSeen(numTokens) {
    return this.inspection.numSeen(this.layer, numTokens);
  }

  /** Whether that layer leaves out some of so many tokens. */
  #windowed(numTokens) {
    return this.#numSeen(numTokens) < numTokens;
  }
}

/** How many sequences like this one the server's own pool has room for, with blocks and without. */
function tellServer({ report, numComputed }) {
  const { num_blocks: numBlocks, max_model_len: longest } = report.served;
  const numHeld = report.block_ids.length;
  const many = (number) => number.toLocaleString("en");
  const fit = Math.floor(numBlocks / numHeld);
  const reserved = Math.max(1, Math.floor((numBlocks * report.block_size) / longest));
  return [
    `This server's pool has ${many(numBlocks)} blocks of ${tokens(report.block_size)}. A sequence of ${tokens(numComputed)} takes ${many(numHeld)} of them, so ${many(fit)} like this one fit at once,`,
    "and never more is wasted than the end of the last block. Nobody knows beforehand how long an answer gets: with one piece of memory for each sequence,",
    `that would have to be kept for the longest possible, ${tokens(longest)} here, and ${many(reserved)} would fit.`,
    "Since a block table says where a block lies, two sequences that begin alike can also have the same blocks in their tables: that is how prefixes are shared.",
  ].join(" ");
}

function tokens(number) {
  return number === 1 ? "1 token" : `${number.toLocaleString("en")} tokens`;
}

function exact(numBytes) {
  return `${Math.round(numBytes).toLocaleString("en")} bytes`;
}

function legend(kind, words, shape = "kv-slot") {
  return el("li", {}, el("span", { class: `${shape} sample ${kind}`, "aria-hidden": "true" }), words);
}
