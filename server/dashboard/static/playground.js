// The page "Playground": streams an answer, and shows its tokens, how likely they were, and the blocks they land in.

import { explainFailure, newRequestId, streamAnswer } from "./answer_stream.js";
import { el, setText } from "./dom.js";
import { count, duration } from "./format.js";
import { mountShell, noticeArea } from "./shell.js";
import { SlotView } from "./slot_view.js";
import { TokenView } from "./token_view.js";

const FIELDS = [ // of the request: name, label, first value, attributes
  ["max_tokens", "Max tokens", "128", { min: 1, step: 1 }],
  ["temperature", "Temperature", "0.7", { min: 0, max: 2, step: "any" }],
  ["top_p", "Top p", "1", { min: 0, max: 1, step: "any" }],
  ["seed", "Seed", "", { step: 1, placeholder: "any" }],
];

mountShell("playground");

const notice = noticeArea();
const slots = new SlotView();
const tokens = new TokenView((place) => tokens.tell(place, whereIs(place)));
const status = el("p", { class: "muted numeric", id: "run-status" });
const announcement = el("p", { class: "unseen", role: "status" }); // what changes with each token is not read out
const prompt = el("textarea", { id: "prompt", rows: 5, required: true, onkeydown: runByKey }, "The paged KV cache is like virtual memory, because");
const system = el("textarea", { id: "system", rows: 2 });
const turns = el("ol", { class: "turns", tabindex: 0, "aria-label": "Conversation so far", hidden: true });
const run = el("button", { type: "submit", class: "primary", id: "run", title: "Ctrl+Enter in the prompt" }, "Run");
const stop = el("button", { type: "button", id: "stop", disabled: true, onclick: () => running?.abort() }, "Stop");
const again = el("button", { type: "button", onclick: () => forget() }, "New conversation");
const chatParts = el("div", { class: "stack", hidden: true }, el("label", { class: "wide" }, "System message, if any", system), turns, again);
const inputs = Object.fromEntries(FIELDS.map(([name, , value, attributes]) => [
  name, el("input", { type: "number", id: name, value, required: name !== "seed", ...attributes }),
]));
let running = null; // the AbortController of the answer that streams
let isComplete = false; // the answer that is shown, by what the server said at its end
let conversation = []; // messages of the turns before

document.getElementById("main").replaceChildren(
  el("h1", {}, "Playground"),
  notice.element,
  el("div", { class: "columns" }, form(), answer()),
  el("section", { class: "card", "aria-labelledby": "slots-title" }, el("h2", { id: "slots-title" }, "Where the tokens lie in the KV cache"),
    slotLegend(), slots.element),
);

function form() {
  const kind = (value, name) => el("label", { class: "inline" },
    el("input", { type: "radio", name: "kind", id: value, value, checked: value === "completion", onchange: showKind }), name);
  return el(
    "form", { class: "card", onsubmit: (event) => { event.preventDefault(); start(); } },
    el("div", { class: "row", role: "radiogroup", "aria-label": "What to ask for" }, kind("completion", "Completion"), kind("chat", "Chat")),
    chatParts,
    el("label", { class: "wide" }, el("span", { id: "prompt-label" }, "Prompt"), prompt),
    el("div", { class: "row fields" }, ...FIELDS.map(([name, label]) => el("label", {}, label, inputs[name]))),
    el("div", { class: "row" }, run, stop),
  );
}

function answer() {
  return el("section", { class: "card", "aria-labelledby": "answer-title" },
    el("div", { class: "head" }, el("h2", { id: "answer-title" }, "Answer"), status), announcement, tokens.legend, tokens.text, tokens.detail);
}

function slotLegend() {
  const kinds = [["prompt", "prompt"], ["cached", "prompt, found in the cache"], ["answer", "answer"], ["empty", "empty"]];
  return el("ul", { class: "legend" }, ...kinds.map(([kind, name]) => el("li", {}, el("span", { class: `slot ${kind}`, "aria-hidden": "true" }), ` ${name}`)));
}

function isChat() {
  return document.getElementById("chat").checked;
}

function showKind() {
  chatParts.hidden = !isChat();
  setText(document.getElementById("prompt-label"), isChat() ? "Your message" : "Prompt");
}

function runByKey(event) {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  prompt.form.requestSubmit();
}

function forget() {
  conversation = [];
  turns.replaceChildren();
  turns.hidden = true;
  prompt.focus();
}

async function start() {
  if (running) return;
  const question = prompt.value;
  const asked = isChat();
  const input = asked ? [...systemMessage(), ...conversation, { role: "user", content: question }] : question;
  const controller = running = new AbortController();
  const requestId = newRequestId();
  [run.disabled, stop.disabled, isComplete] = [true, false, false];
  notice.show("");
  tokens.clear();
  slots.clear();
  const watch = new StopWatch();
  setText(status, "Waiting for the first token …");
  setText(announcement, "Waiting for the answer.");
  let text = "";
  let failure = null;
  try {
    const onResponse = () => slots.follow(requestId);
    for await (const event of streamAnswer(input, options(), { signal: controller.signal, requestId, onResponse })) {
      if (event.tokens) {
        text += event.text;
        tokens.add(event.tokens);
        watch.count(event.tokens.length);
      }
      watch.take(event);
      setText(status, watch.tell());
      if (tokens.chosen !== null) tokens.tellPlace(whereIs(tokens.chosen));
    }
    isComplete = true;
  } catch (error) {
    failure = explainFailure(error);
    if (failure !== null) notice.show(failure);
    watch.take({ finishReason: failure === null ? "stopped" : "failed" });
    setText(status, watch.tell());
  } finally {
    slots.stop();
    [running, run.disabled, stop.disabled] = [null, false, true];
    if (tokens.chosen !== null) tokens.tellPlace(whereIs(tokens.chosen));
    setText(announcement, `${status.textContent}. ${text}`);
  }
  if (asked && text !== "" && failure === null) remember(question, text);
}

function remember(question, text) {
  conversation.push({ role: "user", content: question }, { role: "assistant", content: text });
  turns.append(el("li", {}, el("b", {}, "You: "), question), el("li", {}, el("b", {}, "Model: "), text));
  turns.hidden = false;
  turns.scrollTop = turns.scrollHeight;
  if (prompt.value === question) prompt.value = ""; // else the next one is being written
}

function systemMessage() {
  return system.value.trim() ? [{ role: "system", content: system.value }] : [];
}

function options() {
  return Object.fromEntries(FIELDS.map(([name]) => [name, inputs[name].value]).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
}

function whereIs(place) {
  if (slots.numPromptTokens === null && running) return "Its block table was not seen yet.";
  return slots.locate((slots.numPromptTokens ?? 0) + place, isComplete && place === tokens.tokens.length - 1);
}

/** How an answer goes: tokens, times, and what the server counted at its end. */
class StopWatch {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.numTokens = 0;
    this.usage = null;
    this.finishReason = null;
  }

  count(numTokens) {
    if (numTokens && this.first === null) this.first = performance.now();
    this.numTokens += numTokens;
    this.last = performance.now();
  }

  take({ usage, finishReason }) {
    this.usage = usage ?? this.usage;
    this.finishReason = finishReason ?? this.finishReason;
  }

  tell() {
    const seconds = (this.last - this.first) / 1000;
    const parts = [`${this.numTokens} tokens`];
    if (this.first !== null) parts.push(`first after ${duration((this.first - this.began) / 1000)}`);
    if (this.numTokens > 1 && seconds > 0) parts.push(`then ${count((this.numTokens - 1) / seconds)}/s`);
    if (this.usage) parts.push(`prompt ${this.usage.prompt_tokens}`);
    if (this.finishReason) parts.push({ stop: "ended by itself", length: "reached the limit" }[this.finishReason] ?? this.finishReason);
    return parts.join(" · ");
  }
}
