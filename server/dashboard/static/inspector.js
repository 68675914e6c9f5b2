// The page "Inspector": one prompt, looked at from the inside. What it shows comes from the inspector's own process.

import { onKeyChange } from "./api.js";
import { AttentionView } from "./attention_view.js";
import { CacheView } from "./cache_view.js";
import { el, setText } from "./dom.js";
import { askLimits, inspectPrompt, visible } from "./inspection.js";
import { ShapesView } from "./shapes_view.js";
import { Newest } from "./newest.js";
import { mountShell, noticeArea } from "./shell.js";
import { VectorView } from "./vector_view.js";

mountShell("inspector");

const EXAMPLES = {
  "a pattern to go on with": "Paris is the capital of France, Rome is the capital of Italy, and Madrid is the capital of",
  "words that point back": "The cat sat on the mat because the cat was tired, and the dog",
  "counting": "one two three four five six seven eight",
  "characters of several tokens": "日本語 and 👩‍🚀 take more tokens than letters do",
};

const notice = noticeArea();
const status = el("p", { class: "muted", id: "inspect-status", role: "status" });
const prompt = el("textarea", { id: "prompt", rows: 3, required: true }, Object.values(EXAMPLES)[0]);
const asChat = el("input", { type: "checkbox", id: "as-chat" });
const chatLabel = el("label", { class: "inline", hidden: true }, asChat, "as a chat message");
const maxTokens = el("input", { type: "number", id: "max-tokens", min: 1, max: 32, step: 1, value: 8, required: true });
const bounds = el("span", { class: "muted small", id: "bounds" });
const button = el("button", { type: "submit", class: "primary", id: "inspect" }, "Inspect");
const strip = el("div", {
  class: "tokens inspected", id: "tokens", role: "group", "aria-label": "Tokens; arrow keys go from one to the next",
  onkeydown: (event) => moveAlong(event), onfocusin: (event) => choosePosition(positionOf(event.target)), onclick: (event) => choosePosition(positionOf(event.target)),
});
const tokenTold = el("p", { id: "token-told" });
const layerField = el("select", { id: "layer", onchange: () => chooseHead(Number(layerField.value), chosen.head) });
const headField = el("select", { id: "head", onchange: () => chooseHead(chosen.layer, Number(headField.value)) });
const shapes = new ShapesView((head) => chooseHead(chosen.layer, head));
const attention = new AttentionView((position) => choosePosition(position), (layer, head) => chooseHead(layer, head));
const vectors = new VectorView();
const cache = new CacheView();
const origin = el("p", { class: "muted small" });
const found = el("div", { class: "found", id: "found", hidden: true });

let inspection = null;
let asking = null; // the AbortController of the prompt that is being computed
const newestHead = new Newest();
const newestInput = new Newest();
const chosen = { position: 0, layer: 0, head: 0, tensors: null };

found.append(
  section("tokens-title", "1. Tokens", "A model reads tokens, not letters: pieces of text from a fixed vocabulary, each by its number. Dots stand for spaces. Those after the prompt were generated, each the likeliest one.", strip, tokenTold, origin),
  el("div", { class: "card row pinned" }, el("label", {}, "Layer", layerField), el("label", {}, "Query head", headField), el("span", { class: "muted small" }, "for all that follows")),
  section("shapes-title", "2. From X to queries, keys and values", null, shapes.element),
  section("vectors-title", "3. The vectors of one token, and its position", null, vectors.element),
  section("attention-title", "4. Attention", "A token's query is multiplied with the key of every token up to itself, which gives a score for each: how well the two fit. The softmax makes shares of the scores, and the values are mixed in these shares. " +
    "A head that finds nothing often looks at the very first token. Rows below the line are of tokens that were generated, one at a time, with the cache.", attention.element),
  section("cache-title", "5. The KV cache, token by token", "What a token looks back at are the keys and values of those before it, and they never change: so they are kept. " +
    "The server keeps them in blocks of equal size, like the pages of virtual memory: a sequence takes a block when its last one is full, wherever one is free, " +
    "and its block table says where each of them lies. In the small pool here, other sequences hold blocks as well.", cache.element),
);
document.getElementById("main").replaceChildren(
  el("h1", {}, "Inspector"),
  el("p", {}, "Looks at one prompt from the inside: how the model turns it into queries, keys and values, what each token attends to, and how the KV cache grows. " +
    "It computes beside the server's requests, in a process of its own with few threads and a low priority."),
  notice.element,
  el("form", { class: "card", onsubmit: (event) => { event.preventDefault(); run(); } },
    el("label", { class: "wide" }, "Prompt", prompt),
    el("div", { class: "row small", id: "examples" }, el("span", { class: "muted" }, "Examples:"), ...Object.entries(EXAMPLES).map(([name, text]) =>
      el("button", { type: "button", class: "link", onclick: () => { prompt.value = text; prompt.focus(); } }, name))),
    el("div", { class: "row" }, el("label", {}, "Tokens to generate", maxTokens), chatLabel, button, bounds),
    status),
  found,
);
onKeyChange(showLimits);
showLimits();

function section(id, title, intro, ...content) {
  return el("section", { class: "card", "aria-labelledby": id }, el("h2", { id }, title), intro && el("p", { class: "muted" }, intro), ...content);
}

async function showLimits() {
  try {
    const limits = await askLimits();
    maxTokens.max = limits.max_tokens;
    chatLabel.hidden = !limits.has_chat_template;
    setText(bounds, `At most ${limits.max_prompt_tokens} tokens of prompt and ${limits.max_tokens} after it.`);
    notice.show("");
  } catch (error) {
    fail(error);
  }
}

async function run() {
  asking?.abort();
  const mine = (asking = new AbortController());
  button.disabled = true;
  notice.show("");
  setText(status, "Computing. The first time, the model is loaded into the inspector's process, which takes some seconds.");
  try {
    const body = { prompt: prompt.value, max_tokens: Number(maxTokens.value), chat: asChat.checked };
    const result = await inspectPrompt(body, mine.signal);
    setText(status, `Done: ${result.report.num_prompt_tokens} of the prompt's tokens and ${result.steps.length} after it.`);
    show(result);
  } catch (error) {
    if (error.name === "AbortError") return;
    setText(status, "");
    fail(error);
  } finally {
    if (asking === mine) button.disabled = false;
  }
}

function fail(error) {
  if (error.status === undefined) throw error; // ours
  notice.show(error.status === 401 ? "The inspector needs the server's admin key: enter it above." : error.message);
}

function show(result) {
  inspection = result;
  found.hidden = false;
  const { outline, report } = inspection;
  fill(layerField, outline.num_layers);
  fill(headField, outline.num_q_heads);
  strip.replaceChildren(...inspection.tokens.map((token, position) => el("span", {
    class: `token ${position < report.num_prompt_tokens ? "of-prompt" : "of-answer"}`, role: "img", tabindex: -1, "data-position": position,
    "aria-label": `Token ${position}, ${inspection.quoted(position)}`,
  }, el("span", {}, visible(token.text)), el("small", {}, token.id))));
  const rounding = report.served.quantization === "none" ? "" : ` (${report.served.quantization})`;
  setText(origin, `${report.model}, computed in float32 with the weights as they are served${rounding}. The server's own kernels round more, so where two tokens are nearly equally likely it may take the other.`);
  cache.show(inspection);
  chosen.tensors = null;
  chosen.position = Math.min(report.num_prompt_tokens, inspection.numComputed) - 1;
  chooseHead(Math.min(chosen.layer, outline.num_layers - 1), Math.min(chosen.head, outline.num_q_heads - 1));
  markToken();
}

function fill(field, count) {
  const value = Math.min(Number(field.value) || 0, count - 1);
  field.replaceChildren(...Array.from({ length: count }, (_, i) => el("option", { value: i }, i)));
  field.value = value;
}

function chooseHead(layer, head) {
  const mine = inspection;
  Object.assign(chosen, { layer, head });
  layerField.value = layer;
  headField.value = head;
  shapes.show(inspection, layer, head);
  showInput();
  newestHead.run(async () => {
    try {
      const tensors = await mine.head(layer, head);
      if (inspection !== mine || chosen.layer !== layer || chosen.head !== head) return; // another was chosen meanwhile
      chosen.tensors = tensors;
      attention.show(inspection, layer, tensors, chosen.position);
      vectors.show(inspection, layer, tensors, computed(chosen.position));
      cache.showHead(layer, tensors, `K, V head ${Math.floor(head / inspection.groupSize)} of layer ${layer}`);
      found.dataset.shown = `${layer}/${head}`; // all of this head is on the page
      notice.show("");
    } catch (error) {
      fail(error);
    }
  });
}

function choosePosition(position) {
  if (position === null || position === chosen.position) return;
  chosen.position = position;
  markToken();
  if (chosen.tensors === null) return;
  attention.chooseRow(position);
  vectors.show(inspection, chosen.layer, chosen.tensors, computed(position));
  showInput();
}

/** The last token has no vectors: the one before it is shown in its place. */
function computed(position) {
  return Math.min(position, inspection.numComputed - 1);
}

function showInput() {
  const mine = inspection;
  const { layer, position } = chosen;
  newestInput.run(async () => {
    try {
      const values = await mine.input(layer, computed(position));
      if (inspection === mine && chosen.layer === layer && chosen.position === position) vectors.showInput(values);
    } catch (error) {
      fail(error);
    }
  });
}

function markToken() {
  const { position } = chosen;
  for (const element of strip.children) {
    const isChosen = Number(element.dataset.position) === position;
    element.classList.toggle("chosen", isChosen);
    element.tabIndex = isChosen ? 0 : -1;
  }
  const { id } = inspection.tokens[position];
  const told = [`Token ${position}: ${inspection.quoted(position)}, number ${id} of the vocabulary.`];
  if (position < inspection.numComputed) {
    const { place, block, slot } = inspection.placeOf(position);
    told.push(`Its keys and values lie in slot ${slot} of block ${block}, which is at place ${place} of the block table.`);
  } else {
    told.push("It was chosen last and not computed, so it has no vectors and no slot; below, the token before it is shown.");
  }
  setText(tokenTold, told.join(" "));
}

function positionOf(element) {
  const token = element.closest("[data-position]");
  return token === null ? null : Number(token.dataset.position);
}

function moveAlong(event) {
  const last = inspection.tokens.length - 1;
  const from = chosen.position;
  const moves = { ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Home: 0, End: last };
  if (!(event.key in moves)) return;
  event.preventDefault();
  strip.children[Math.min(last, Math.max(0, moves[event.key]))].focus();
}
