// The KV cache growing step by step: what a step computes, writes, reads, and which token it leads to.
// A slider goes from step to step. Does not know the server.

import { CacheRows } from "./cache_rows.js";
import { el, setText } from "./dom.js";
import { bytes } from "./format.js";
import { visible } from "./inspection.js";

/** The cache of one inspection. */
export class CacheView {
  constructor() {
    this.inspection = null;
    this.slider = el("input", { type: "range", id: "step", min: 0, step: 1, value: 0, oninput: () => this.#show(Number(this.slider.value)) });
    this.back = el("button", { type: "button", id: "step-back", onclick: () => this.#show(this.step - 1) }, "Back");
    this.next = el("button", { type: "button", id: "step-next", onclick: () => this.#show(this.step + 1) }, "Next");
    this.told = el("div", { class: "stack", id: "step-told", role: "status" });
    this.facts = el("dl", { class: "facts", id: "step-facts" });
    this.blocks = el("ol", { class: "kv-blocks", id: "kv-blocks", "aria-label": "Blocks of the cache and the tokens in their slots" });
    this.rows = new CacheRows();
    this.candidates = el("tbody", { id: "candidates" });
    this.element = el(
      "div", { class: "stack" },
      el("div", { class: "row" }, el("label", { class: "grow" }, el("span", { id: "step-name" }, "Step"), this.slider), this.back, this.next),
      this.told,
      this.facts,
      el("ul", { class: "legend" }, legend("read", "read in this step"), legend("new", "written in this step"), legend("", "empty")),
      this.blocks,
      this.rows.element,
      el("table", {}, el("caption", {}, "What could come next; the likeliest is taken"), this.candidates),
    );
  }

  /** Shows an inspection from its first step on. */
  show(inspection) {
    this.inspection = inspection;
    this.slider.max = inspection.steps.length - 1;
    this.#show(0);
  }

  /** Shows the keys and values of a head; `name` is what it is called. */
  showHead(tensors, name) {
    this.rows.show(tensors, name);
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
        `of which those below the diagonal count; their softmax times V [${cost.rows}, ${outline.head_dim}] gives [${cost.rows}, ${outline.head_dim}].`,
    ];
  }

  #tellToken(cost) {
    const { outline } = this.inspection;
    const position = cost.end - 1;
    const { place, block, slot } = this.inspection.placeOf(position);
    return [
      `Only the newest token, ${this.inspection.quoted(position)} at position ${position}, goes through the model (decode): in each layer one row of Q, one of K, one of V. ` +
        `The keys and values of ${tokens(cost.readTokens)} before it are read from the cache, and not computed again.`,
      `Its own key and value go into slot ${slot} of block ${block}, number ${place} of the block table${slot === 0 ? ", which had to be taken from the pool for it" : ""}.`,
      `In a head: q [1, ${outline.head_dim}] times K transposed [${outline.head_dim}, ${cost.end}] gives ${cost.end} scores; their softmax times V [${cost.end}, ${outline.head_dim}] gives [1, ${outline.head_dim}].`,
    ];
  }

  #showFacts(cost) {
    const { report } = this.inspection;
    const saved = cost.recomputed / cost.end;
    const facts = {
      "Rows of Q, K and V computed, in each layer": `${cost.rows}, and ${cost.rowsWithoutCache} without a cache`,
      "So far": `${cost.end}, and ${cost.recomputed} without a cache${saved >= 1.05 ? `: ${saved.toFixed(1)} times as many` : ""}`,
      "A token takes in each layer": `${exact(report.served.bytes_per_token_per_layer)} (${report.served.dtype})`,
      "Written in this step": `${exact(cost.writtenPerLayer)} in each layer, ${bytes(cost.written)} in all`,
      "Read in this step": cost.read ? `${bytes(cost.read)} in all layers` : "nothing: there was nothing before",
      "The cache holds": `${bytes(cost.held)} in ${this.#count(this.inspection.steps[this.step].num_blocks, "block")} of ${tokens(report.block_size)}`,
    };
    this.facts.replaceChildren(...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  #showBlocks(cost) {
    const { report, steps } = this.inspection;
    const step = steps[this.step];
    this.blocks.replaceChildren(...report.block_ids.slice(0, step.num_blocks).map((block, place) => {
      const slots = Array.from({ length: report.block_size }, (_, slot) => {
        const position = place * report.block_size + slot;
        if (position >= cost.end) return el("li", { class: "kv-slot" }, "");
        const kind = position >= step.first_position ? "new" : "read";
        return el("li", { class: `kv-slot ${kind}`, title: `position ${position}: ${this.inspection.quoted(position)}` }, visible(report.tokens[position].text));
      });
      return el("li", {}, el("span", { class: "mono small" }, `block ${block}`), el("ol", { class: "kv-slots" }, ...slots));
    }));
  }

  #showCandidates() {
    const { candidates } = this.inspection.steps[this.step];
    this.candidates.replaceChildren(...candidates.map((candidate) => {
      const bar = el("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${100 * candidate.probability}%`;
      return el("tr", {}, el("td", {}, el("code", {}, JSON.stringify(candidate.text))), el("td", { class: "number" }, `${(100 * candidate.probability).toFixed(1)} %`),
        el("td", { class: "bars" }, bar));
    }));
  }

  #count(number, noun) {
    return number === 1 ? `1 ${noun}` : `${number} ${noun}s`;
  }
}

function tokens(number) {
  return number === 1 ? "1 token" : `${number} tokens`;
}

function exact(numBytes) {
  return `${Math.round(numBytes).toLocaleString("en")} bytes`;
}

function legend(kind, words) {
  return el("li", {}, el("span", { class: `kv-slot sample ${kind}`, "aria-hidden": "true" }), words);
}
