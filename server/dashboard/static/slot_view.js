// The blocks that one sequence's tokens land in: each block of its table with a square for each slot.
// What it knows comes from GET /v1/requests/{id}, asked while the answer streams. Knows no tokens.

import { requestJson } from "./api.js";
import { el, setText } from "./dom.js";

const MILLISECONDS = 100; // between an answer and the next question
const MAX_SHOWN = 48; // blocks, the last ones

/** Follows a request's block table, and shows it. */
export class SlotView {
  constructor() {
    this.told = el("p", { class: "small" });
    this.list = el("ol", { class: "slots", "aria-label": "Block table of the answer" });
    this.element = el("div", { class: "stack" }, this.told, this.list);
    this.chosen = null; // the position of a token in its sequence
    this.clear();
  }

  clear() {
    clearTimeout(this.timer);
    this.requestId = null;
    this.isOver = false;
    this.prompt = null; // what the server last said of it while it had blocks
    this.blockSize = null;
    this.chosen = null;
    this.list.replaceChildren();
    setText(this.told, "Run a prompt to see the blocks of its block table fill.");
  }

  /** Asks for the table now and again, until `stop`. */
  follow(requestId) {
    this.clear();
    setText(this.told, "Nothing of its block table was seen yet.");
    this.requestId = requestId;
    this.#ask(requestId);
  }

  /** The answer is complete, or will never be. */
  stop() {
    clearTimeout(this.timer);
    this.isOver = true; // an answer that is on its way is still of use
    if (this.prompt !== null) this.#show();
  }

  /** Prompt tokens before the answer; null while unknown. */
  get numPromptTokens() {
    return this.prompt?.num_prompt_tokens ?? null;
  }

  /** In a sentence: where the token at this position of the sequence lies. Marks the slot. */
  locate(position, isLast) {
    this.chosen = position;
    this.#mark();
    if (this.prompt === null) return "The answer was complete before its block table was seen.";
    const [sequence] = this.prompt.sequences;
    const place = Math.floor(position / this.blockSize);
    if (isLast) return "It has no slot: nothing was computed after it, so its keys and values were never needed.";
    if (place >= sequence.block_table.length) return "Its block was not seen: the table is asked for a few times a second.";
    return `In slot ${position % this.blockSize} of block ${sequence.block_table[place]}, which is number ${place} of its block table.`;
  }

  async #ask(requestId) {
    try {
      const details = await requestJson(`v1/requests/${requestId}`);
      if (this.requestId !== requestId) return;
      const [prompt] = details.prompts;
      if (details.block_size && prompt?.sequences?.[0]?.block_table.length) {
        this.prompt = prompt;
        this.blockSize = details.block_size;
        this.#show();
      }
    } catch {
      // Not known yet, or the engine is busy for a moment: the stream itself tells of errors.
    }
    if (this.requestId === requestId && !this.isOver) this.timer = setTimeout(() => this.#ask(requestId), MILLISECONDS);
  }

  #show() {
    const [sequence] = this.prompt.sequences;
    const table = sequence.block_table;
    const first = Math.max(0, table.length - MAX_SHOWN);
    const cached = this.prompt.num_cached_tokens;
    setText(this.told, [
      `${sequence.num_blocks} blocks of ${this.blockSize} tokens: ${this.prompt.num_prompt_tokens} of the prompt, of which ${cached} were found in the cache,`,
      `and ${Math.max(0, sequence.num_computed_tokens - this.prompt.num_prompt_tokens)} of the answer.`,
      first ? `The ${first} blocks before these are not drawn.` : "",
      this.isOver ? "That is what was seen last: now its blocks are free again." : "",
    ].join(" "));
    table.slice(first).forEach((blockId, i) => this.#showBlock(blockId, first + i, i, sequence.num_computed_tokens, cached));
    while (this.list.children.length > table.length - first) this.list.lastChild.remove();
    this.#mark();
  }

  #showBlock(blockId, place, i, numComputed, cached) {
    const item = this.list.children[i] ?? this.list.appendChild(this.#newBlock());
    setText(item.firstChild, `block ${blockId}`);
    [...item.lastChild.children].forEach((slot, offset) => {
      const position = place * this.blockSize + offset;
      const kind = position >= numComputed ? "empty" : position < cached ? "cached" : position < this.prompt.num_prompt_tokens ? "prompt" : "answer";
      slot.className = `slot ${kind}`;
      slot.dataset.position = position;
    });
  }

  #newBlock() {
    const slots = Array.from({ length: this.blockSize }, () => el("span", { class: "slot empty" }));
    return el("li", {}, el("span", { class: "mono small" }), el("span", { class: "row-of-slots", "aria-hidden": "true" }, ...slots));
  }

  #mark() {
    this.list.querySelector(".chosen")?.classList.remove("chosen");
    this.list.querySelector(`[data-position='${this.chosen}']`)?.classList.add("chosen");
  }
}
