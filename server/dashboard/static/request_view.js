// The story of one request: what it waited for, what was cached, who preempted it, and its block tables.
// Shows the answer of GET /v1/requests/{id}; the server itself says what happened in sentences.

import { ApiError, requestJson } from "./api.js";
import { el, setText } from "./dom.js";
import { clock, duration } from "./format.js";
import { poll } from "./polling.js";
import { noticeArea } from "./shell.js";

const SECONDS = 1;
const PATIENCE = 15; // seconds
const FINAL = [401, 403, 404]; // statuses that stay for as long as the key does

/**
 * A panel that is hidden until `open` shows a request in it; `onChange` is called with its id, or null when closed;
 * `now` tells the time by the server's clock, in seconds.
 */
export class RequestView {
  constructor(onChange, now) {
    this.onChange = onChange;
    this.now = now;
    this.id = null;
    this.opener = null; // the element that had the focus
    this.notice = noticeArea();
    this.title = el("h2", { id: "request-title", tabindex: -1 }, "Request");
    this.content = el("div", { class: "stack" });
    this.element = el(
      "section", { class: "card", id: "request", "aria-labelledby": "request-title", hidden: true },
      el("div", { class: "head" }, this.title, el("button", { type: "button", onclick: () => this.close() }, "Close")),
      this.notice.element,
      this.content,
    );
    this.follow = poll((signal) => this.#ask(signal));
  }

  /** Shows a request by the id of its answer, and follows it while it lives. */
  open(id) {
    if (!this.element.contains(document.activeElement)) this.opener = document.activeElement;
    this.id = id;
    this.content.replaceChildren();
    setText(this.title, `Request ${id}`);
    this.element.hidden = false;
    this.title.focus();
    this.onChange(id);
    this.follow();
  }

  close() {
    this.id = null;
    this.element.hidden = true;
    this.onChange(null);
    if (this.opener?.isConnected) this.opener.focus();
  }

  async #ask(signal) {
    if (this.id === null) return null;
    try {
      const details = await requestJson(`v1/requests/${encodeURIComponent(this.id)}`, { signal, patience: PATIENCE });
      this.notice.show("");
      this.#show(details);
      return details.ended === null ? SECONDS : null;
    } catch (error) {
      if (signal.aborted || !(error instanceof ApiError)) throw error;
      this.notice.show(error.message);
      return FINAL.includes(error.status) ? null : SECONDS;
    }
  }

  #show(details) {
    const seconds = (details.ended ?? this.now()) - details.created;
    const facts = [
      ["Endpoint", details.endpoint],
      ["Key", details.key ?? "none"],
      ["Came at", clock(details.created)],
      ["Status", details.status === null ? "is being answered" : String(details.status)],
      [details.ended === null ? "For" : "Took", duration(Math.max(0, seconds))],
    ];
    this.content.replaceChildren(factList(facts), ...details.prompts.map((prompt) => promptPart(prompt, details.num_prompts)));
  }
}

/** A list of names and values. */
export function factList(facts) {
  return el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** A block table as boxes in the order of the tokens. */
export function blockTable(blockIds, numBlocks) {
  const more = numBlocks - blockIds.length;
  return el(
    "ol", { class: "blocks", "aria-label": "Block table" },
    ...blockIds.map((id) => el("li", {}, String(id))),
    more > 0 ? el("li", { class: "more" }, `and ${more} more`) : null,
  );
}

function promptPart(prompt, numPrompts) {
  return el(
    "div", { class: "stack" },
    numPrompts > 1 ? el("h3", {}, `Prompt ${prompt.index}`) : null,
    el("p", {}, prompt.explanation.join(" ")),
    prompt.state === null ? null : factList(promptFacts(prompt)),
    ...prompt.sequences.map((sequence) => sequencePart(sequence, prompt.sequences.length)),
    prompt.preemptions.length ? preemptionTable(prompt.preemptions) : null,
  );
}

function promptFacts(prompt) {
  return [
    ["State", prompt.state.replaceAll("_", " ")],
    ["Prompt", `${prompt.num_prompt_tokens} tokens`],
    ["Of them cached", `${prompt.num_cached_tokens}`],
    ["Generated", `${prompt.num_generated_tokens} tokens`],
    ["Queue", duration(prompt.queue_seconds)],
    ["Prefill", duration(prompt.prefill_seconds)],
    ["Decode", duration(prompt.decode_seconds)],
    ["Preempted", `${prompt.num_preemptions} times`],
    ["Computed again", `${prompt.num_recomputed_tokens} tokens`],
  ];
}

function sequencePart(sequence, numSequences) {
  const name = numSequences > 1 ? `Answer ${sequence.index}, ` : "";
  const swapped = sequence.num_swapped_blocks ? `, ${sequence.num_swapped_blocks} blocks in host memory` : "";
  const told = `${name}${sequence.state.replaceAll("_", " ")}: ${sequence.num_computed_tokens} of ${sequence.num_tokens} tokens ` +
    `are computed${sequence.num_blocks ? `, in ${sequence.num_blocks} blocks` : ""}${swapped}.`;
  return el("div", {}, el("p", { class: "small" }, told[0].toUpperCase() + told.slice(1)), sequence.block_table.length ? blockTable(sequence.block_table, sequence.num_blocks) : null);
}

function preemptionTable(preemptions) {
  const row = (p) => el("tr", {}, el("td", {}, clock(p.time)), el("td", {}, p.cause.replaceAll("_", " ")), el("td", {}, p.by ?? "another key's"),
    el("td", { class: "number" }, p.swapped ? "swapped" : String(p.num_lost_tokens)));
  return el(
    "div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Preemptions" },
    el("table", {}, el("thead", {}, el("tr", {}, ...["Time", "Cause", "Made way for", "Tokens lost"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, ...preemptions.map(row))),
  );
}
