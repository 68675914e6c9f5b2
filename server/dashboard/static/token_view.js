// The tokens of an answer as text, coloured by how likely each was; one of them at a time is told about in full.
// Arrow keys go from token to token. Knows neither the server nor blocks.

import { spell } from "./answer_stream.js";
import { el, setText } from "./dom.js";

const NEAR_END = 24; // CSS pixels
const LEVELS = [0.9, 0.6, 0.3, 0.1]; // least probabilities of the colours, the best first

/** `onChoose` is called with the place of the token that is pointed at or focused. */
export class TokenView {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.tokens = [];
    this.chosen = null;
    this.follows = true; // the end of the text is in view, and shall stay there
    this.text = el("div", {
      class: "tokens", id: "tokens", role: "group", "aria-label": "Tokens of the answer; arrow keys go from one to the next",
      onkeydown: (event) => this.#onKey(event),
      onfocusin: (event) => this.#chooseElement(event.target),
      onpointerover: (event) => this.#chooseElement(event.target),
      onscroll: () => { this.follows = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < NEAR_END; },
    });
    this.detail = el("div", { class: "stack small", id: "token-detail" });
    this.legend = el("ul", { class: "legend" }, ...[...LEVELS, 0].map((least, level) => el(
      "li", { class: `token p${level}` }, level < LEVELS.length ? `${100 * least} % and more` : "less",
    )));
  }

  clear() {
    this.tokens = [];
    this.chosen = null;
    this.follows = true;
    this.text.replaceChildren();
    this.detail.replaceChildren();
  }

  /** Adds tokens at the end. */
  add(tokens) {
    for (const token of tokens) {
      const place = this.tokens.length;
      this.tokens.push(token);
      const probability = Math.exp(token.logprob);
      const level = LEVELS.findIndex((least) => probability >= least);
      const spelled = spell(token);
      this.text.append(el(
        "span",
        {
          class: `token p${level < 0 ? LEVELS.length : level}`, role: "img", tabindex: place === 0 ? 0 : -1, "data-place": place,
          "aria-label": `${JSON.stringify(spelled)}, ${percentOf(token.logprob)}`,
        },
        spelled.replaceAll("\n", "⏎\n") || "∅",
      ));
    }
    if (this.follows) requestAnimationFrame(() => { this.text.scrollTop = this.text.scrollHeight; });
  }

  /** Shows a token and its alternatives; `where` says in a sentence where it lies. */
  tell(place, where) {
    const token = this.tokens[place];
    this.detail.replaceChildren(
      el("h3", {}, `Token ${place}: `, el("code", {}, JSON.stringify(spell(token)))),
      el("p", {}, `Log-probability ${token.logprob.toFixed(3)}, which is ${percentOf(token.logprob)}.`),
      el("p", { id: "token-place" }, where),
      this.#alternatives(token),
    );
  }

  /** Changes the sentence alone. */
  tellPlace(where) {
    const element = this.detail.querySelector("#token-place");
    if (element) setText(element, where);
  }

  #alternatives({ top }) {
    const row = (other) => {
      const bar = el("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${100 * Math.exp(other.logprob)}%`;
      return el("tr", {}, el("td", {}, el("code", {}, JSON.stringify(spell(other)))), el("td", { class: "number" }, percentOf(other.logprob)),
        el("td", { class: "bars" }, bar));
    };
    return el("table", {}, el("caption", {}, "The likeliest here, and the one that came"), el("tbody", {}, ...top.map(row)));
  }

  #chooseElement(element) {
    if (!element.dataset?.place) return;
    const place = Number(element.dataset.place);
    if (place === this.chosen) return;
    const former = this.text.querySelector("[tabindex='0']");
    if (former) former.tabIndex = -1;
    element.tabIndex = 0;
    this.text.querySelector(".chosen")?.classList.remove("chosen");
    element.classList.add("chosen");
    this.chosen = place;
    this.onChoose(place);
  }

  #onKey(event) {
    const from = this.chosen ?? 0;
    const moves = { ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Home: 0, End: this.tokens.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const place = Math.min(this.tokens.length - 1, Math.max(0, moves[event.key]));
    this.text.children[place]?.focus();
  }
}

function percentOf(logprob) {
  const percent = 100 * Math.exp(logprob);
  return percent >= 0.01 ? `${percent.toFixed(percent < 1 ? 2 : 1)} %` : "less than 0.01 %";
}
