// What was computed for one prompt: the server's report, and the tensors of a head as they come. Knows no page.

import { ApiError, requestBytes, requestJson } from "./api.js";

const PATH = "dashboard/data/inspector";
const MAX_HEADS = 24; // whose tensors are kept
const MAX_TRIES = 10; // for tensors, while the process answers others
const OF_BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/; // how the server writes a token that is no text by itself
const SIGNS = { "\n": "⏎", "\t": "⇥", " ": "·", "\x7f": "␡" };

/** How long a prompt may be, and how many tokens may follow it. */
export function askLimits(signal) {
  return requestJson(PATH, { signal });
}

/** Has a prompt computed. Throws ApiError. */
export async function inspectPrompt(body, signal) {
  return new Inspection(await requestJson(PATH, { body, signal }), body);
}

/** One prompt, looked at. Positions count from 0; the last token was chosen and not computed. */
export class Inspection {
  constructor(report, body) {
    this.report = report;
    this.body = body; // that was sent for it
    this.id = report.id;
    this.renewing = null; // a promise, while the prompt is computed once more
    this.tokens = report.tokens;
    this.outline = report.outline;
    this.steps = report.steps;
    this.numComputed = report.tokens.length - 1;
    this.heads = new Map(); // "layer/head" -> promise of tensors, the one asked for last stands last
  }

  /** A token for a sentence, in quotes. */
  quoted(position) {
    return quoted(this.tokens[position].text);
  }

  /** Query heads that share a key and value head with others: how many each. */
  get groupSize() {
    return this.outline.num_q_heads / this.outline.num_kv_heads;
  }

  /** Where the keys and values of a position lie. */
  placeOf(position) {
    const place = Math.floor(position / this.report.block_size);
    return { place, block: this.report.block_ids[place], slot: position % this.report.block_size };
  }

  /** Tokens that a token of this layer sees when there are so many, itself included. */
  numSeen(layer, numTokens) {
    const window = this.report.layers[layer].sliding_window;
    return window === null ? numTokens : Math.min(window, numTokens);
  }

  /** What the softmax takes of a product of query and key: scaled, and where the model does that, capped. */
  score(product) {
    const { scale, logit_softcap: cap } = this.outline;
    return cap === null ? product * scale : cap * Math.tanh((product * scale) / cap);
  }

  /** What a step costs. Bytes are those of the server's own cache. */
  costOf(index) {
    const step = this.steps[index];
    const end = step.first_position + step.num_tokens;
    const perLayer = this.report.served.bytes_per_token_per_layer;
    const numLayers = this.outline.num_layers;
    const seen = this.report.layers.map((_, layer) => this.numSeen(layer, end));
    return {
      end,
      rows: step.num_tokens,
      rowsWithoutCache: end,
      readTokens: step.first_position,
      writtenPerLayer: step.num_tokens * perLayer,
      written: step.num_tokens * perLayer * numLayers,
      // A whole prompt attends to keys that it has just made; a single token reads those of all before it.
      read: step.first_position === 0 ? 0 : seen.reduce((sum, count) => sum + (count - 1) * perLayer, 0),
      held: end * perLayer * numLayers,
      recomputed: this.steps.slice(0, index + 1).reduce((sum, each) => sum + each.first_position + each.num_tokens, 0),
    };
  }

  /** The tensors of a head: see HeadTensors. Throws ApiError. */
  head(layer, head) {
    const key = `${layer}/${head}`;
    const known = this.heads.get(key) ?? this.#ask(`head?layer=${layer}&head=${head}`)
      .then((buffer) => new HeadTensors(buffer, this.outline.head_dim));
    this.heads.delete(key);
    this.heads.set(key, known);
    known.catch(() => this.heads.delete(key));
    if (this.heads.size > MAX_HEADS) this.heads.delete(this.heads.keys().next().value);
    return known;
  }

  /** What goes into a layer's projections at a position: a row of X. Throws ApiError. */
  async input(layer, position) {
    const buffer = await this.#ask(`input?layer=${layer}&position=${position}`);
    return readTensors(buffer).tensors.input;
  }

  /** What the process kept is gone once it has idled or crashed: then it computes the prompt once more. */
  async #ask(query) {
    const id = this.id;
    try {
      return await patiently(() => requestBytes(`${PATH}/${id}/${query}`));
    } catch (error) {
      if (error.code !== "request_not_found") throw error;
    }
    if (this.id === id) await (this.renewing ??= this.#renew().finally(() => { this.renewing = null; }));
    return patiently(() => requestBytes(`${PATH}/${this.id}/${query}`));
  }

  async #renew() {
    const report = await patiently(() => requestJson(PATH, { body: this.body }));
    const isSame = ["model", "tokens", "outline"].every((part) => JSON.stringify(report[part]) === JSON.stringify(this.report[part]));
    if (!isSame) throw new ApiError("The server computes this prompt in another way now, perhaps with another model: inspect it again.", 404);
    this.id = report.id;
  }
}

/** What a head of a layer computed: weights, and vectors by name ("query", "rotated_query", "key", ...). */
export class HeadTensors {
  constructor(buffer, headDim) {
    const { numTokens, tensors } = readTensors(buffer);
    this.numTokens = numTokens;
    this.tensors = tensors;
    this.headDim = headDim;
  }

  /** How much of its attention a token gives to one before it, or to itself: 0 to 1. */
  weight(from, to) {
    return this.tensors.weights[(from * (from + 1)) / 2 + to];
  }

  /** All that a token gives, to the tokens up to it. */
  row(from) {
    const start = (from * (from + 1)) / 2;
    return this.tensors.weights.subarray(start, start + from + 1);
  }

  vector(name, position) {
    return this.tensors[name].subarray(position * this.headDim, (position + 1) * this.headDim);
  }

  /** What the head hands on for a token: the values that it sees, each times its share, added up. */
  mixed(from) {
    const sum = new Float32Array(this.headDim);
    this.row(from).forEach((weight, to) => this.vector("value", to).forEach((value, i) => { sum[i] += weight * value; }));
    return sum;
  }

  /** The product of a token's query and another's key, with their positions in them. */
  product(from, to) {
    const key = this.vector("rotated_key", to);
    return this.vector("rotated_query", from).reduce((sum, value, i) => sum + value * key[i], 0);
  }
}

/** Takes apart what server/dashboard/inspection_picture.py puts together. */
export function readTensors(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const bytes = new DataView(buffer);
  let start = 4 + size;
  const tensors = {};
  head.names.forEach((name, i) => {
    const values = new Float32Array(head.sizes[i]);
    for (let place = 0; place < values.length; place += 1) values[place] = fromHalf(bytes.getUint16(start + 2 * place, true));
    tensors[name] = values;
    start += 2 * values.length;
  });
  return { numTokens: head.num_tokens, tensors };
}

/** The number that 16 bits stand for in IEEE 754's binary16. */
export function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** A token's text with what cannot be seen made visible; the bytes of one that is only part of a character. */
export function visible(text) {
  return bytesOf(text) ?? (text.replace(/[\p{C}\p{Z}]/gu, shown) || "∅");
}

/** A token's text for a sentence, in quotes. */
export function quoted(text) {
  const bytes = bytesOf(text);
  if (bytes !== null) return `part of a character (${bytes.includes(" ") ? "bytes" : "byte"} ${bytes})`;
  return JSON.stringify(text).replace(/\p{C}/gu, (character) => `\\u{${hex(character)}}`);
}

function bytesOf(text) {
  return OF_BYTES.exec(text)?.[1].slice(2).replaceAll("\\x", " ") ?? null;
}

function shown(character) {
  const code = character.codePointAt(0);
  return SIGNS[character] ?? (code < 32 ? String.fromCodePoint(0x2400 + code) : `U+${hex(character)}`);
}

function hex(character) {
  return character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** What `ask` resolves to, asked again while the server says that others come first. */
async function patiently(ask) {
  for (let tries = 1; ; tries += 1) {
    try {
      return await ask();
    } catch (error) {
      if (error.status !== 429 || tries === MAX_TRIES) throw error;
      await new Promise((resolve) => { setTimeout(resolve, 1000 * (error.retryAfter ?? 1)); });
    }
  }
}
