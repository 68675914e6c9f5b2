// The tables of the requests that are being answered, with the blocks that they hold, and of the last ones that were.
// A row stays the same element from one second to the next, so that the keyboard's place in it is kept.

import { el, setText } from "./dom.js";
import { count, duration, shortId } from "./format.js";
import { requestColour } from "./pool_view.js";
import { onThemeChange } from "./theme.js";

const LIVE_COLUMNS = ["Request", "Key", "State", "For", "Tokens", "Blocks"];
const ENDED_COLUMNS = ["Request", "Key", "Status", "Took", "First token", "Prompt", "Cached", "Generated", "Preempted"];
const OF_WORDS = ["Request", "Key", "State"]; // the other columns are of numbers

/** Both tables. `onOpen` is called with the id of an answer. */
export class RequestTables {
  constructor(onOpen) {
    this.live = new Rows(LIVE_COLUMNS, onOpen, true);
    this.ended = new Rows(ENDED_COLUMNS, onOpen, false);
    this.more = el("p", { class: "muted small", hidden: true });
    this.element = el(
      "div", { class: "tables" },
      el("section", { class: "card" }, el("h2", {}, "Requests being answered"), this.live.element, this.more),
      el("section", { class: "card" }, el("h2", {}, "Last requests"), this.ended.element),
    );
  }

  /** Shows what `dashboard/data/live` said; the PoolPicture, if any, tells who held blocks at `lookedAt`, as the server's clock was. */
  show(live, picture, lookedAt) {
    const held = new Map();
    for (const holder of picture?.holders ?? []) {
      const sum = held.get(holder.id) ?? { tokens: 0, blocks: 0 };
      sum.tokens += holder.num_tokens;
      sum.blocks += holder.num_blocks;
      held.set(holder.id, sum);
    }
    const stateOf = ({ id, created }) => (held.has(id) ? "running" : picture === null ? "–" : created > lookedAt ? "new" : "waiting");
    this.live.show(live.open.map((trace) => liveCells(trace, stateOf(trace), held.get(trace.id), live.time)), "Nothing is being answered.");
    this.ended.show(live.ended.map(endedCells), "None has ended yet.");
    const hidden = live.num_open - live.open.length;
    setText(this.more, `These are the oldest; ${hidden} more are not shown.`);
    this.more.hidden = hidden <= 0;
  }
}

function liveCells(trace, state, held, now) {
  const cells = [
    trace.key ?? "–", state, duration(Math.max(0, now - trace.created)),
    count(held?.tokens), count(held?.blocks),
  ];
  return { id: trace.id, cells };
}

function endedCells(record) {
  const cells = [
    record.key ?? "–", String(record.status), duration(record.seconds),
    duration(record.prefill_seconds === null ? null : record.queue_seconds + record.prefill_seconds),
    count(record.prompt_tokens), count(record.cached_tokens), count(record.completion_tokens), count(record.preemptions),
  ];
  return { id: record.id, cells };
}

class Rows {
  constructor(columns, onOpen, withColours) {
    this.columns = columns;
    this.onOpen = onOpen;
    this.withColours = withColours;
    this.rows = new Map(); // by id
    this.body = el("tbody", {});
    this.empty = el("p", { class: "muted" });
    this.table = el("table", {}, el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col", class: classOf(name) }, name)))), this.body);
    this.element = el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": withColours ? "Requests being answered" : "Last requests" },
      this.table, this.empty);
    onThemeChange(() => this.#colour());
  }

  show(wanted, whenEmpty) {
    const rows = new Map(wanted.map(({ id, cells }) => [id, this.#row(id, cells)]));
    this.rows = rows;
    const elements = [...rows.values()];
    const isSame = elements.length === this.body.children.length && elements.every((row, i) => row === this.body.children[i]);
    if (!isSame) this.#place(elements);
    this.table.hidden = rows.size === 0;
    this.empty.hidden = rows.size > 0;
    setText(this.empty, whenEmpty);
  }

  /** Moves only rows that are out of place: one that is taken out and put in again loses the focus. */
  #place(elements) {
    const wanted = new Set(elements);
    for (const row of [...this.body.children]) if (!wanted.has(row)) row.remove();
    elements.forEach((row, i) => {
      if (this.body.children[i] !== row) this.body.insertBefore(row, this.body.children[i] ?? null);
    });
  }

  #row(id, cells) {
    const row = this.rows.get(id) ?? this.#newRow(id);
    cells.forEach((text, i) => setText(row.children[1 + i], text));
    return row;
  }

  #newRow(id) {
    const button = el("button", { type: "button", class: "link mono", title: id, onclick: () => this.onOpen(id) }, shortId(id));
    const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = requestColour(id);
    return el(
      "tr", { "data-id": id },
      el("td", {}, this.withColours ? swatch : null, button),
      ...this.columns.slice(1).map((name) => el("td", { class: classOf(name) })),
    );
  }

  #colour() {
    if (!this.withColours) return;
    for (const [id, row] of this.rows) row.querySelector(".swatch").style.background = requestColour(id);
  }
}

function classOf(column) {
  return OF_WORDS.includes(column) ? null : "number";
}
