// The page "Live": asks for the server's state once a second while it is seen, and shows it.

import { ApiError, getKey, requestBytes, requestJson } from "./api.js";
import { LineChart } from "./chart.js";
import { el, setText } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { poll } from "./polling.js";
import { PoolPicture } from "./pool_picture.js";
import { PoolView } from "./pool_view.js";
import { RequestTables } from "./request_tables.js";
import { RequestView } from "./request_view.js";
import { Samples } from "./samples.js";
import { mountShell, noticeArea } from "./shell.js";

const SECONDS = 1;
const PATIENCE = 15; // seconds, longer than the server waits for its engine
const RATE_SECONDS = 3; // that a rate is the mean of
const LATENCY_SECONDS = 15; // whose values make percentiles
const LONG_SECONDS = 60; // of what is rarer

mountShell("live");

const samples = new Samples();
const notice = noticeArea();
const request = new RequestView((id) => pool.highlight(id), () => Date.now() / 1000 + ahead);
const tables = new RequestTables((id) => request.open(id));
const pool = new PoolView((id) => request.open(id));
const facts = el("p", { class: "muted small", id: "facts" });
const tiles = {};
const charts = {
  throughput: new LineChart("Tokens each second", [
    { name: "generated", colour: "--series-1" }, { name: "prompts", colour: "--series-2" },
  ], count),
  requests: new LineChart("Sequences", [
    { name: "running", colour: "--series-1" }, { name: "waiting", colour: "--series-2" },
  ], count),
  firstToken: new LineChart("Time to first token", percentileSeries(), duration),
  interToken: new LineChart("Time between tokens", percentileSeries(), duration),
  wholeAnswer: new LineChart("Time to the whole answer", percentileSeries(), duration),
  queue: new LineChart("Time in the queue", percentileSeries(), duration),
  steps: new LineChart("Where the engine's time goes", [
    { name: "execute", colour: "--series-1" }, { name: "schedule", colour: "--series-2" },
    { name: "update", colour: "--series-3" }, { name: "between", colour: "--series-4" },
  ], percent, { max: 1 }),
  losses: new LineChart("Lost each second", [
    { name: "preempted", colour: "--series-2" }, { name: "blocks evicted", colour: "--series-3" },
    { name: "tokens recomputed", colour: "--series-4" },
  ], count),
  cache: new LineChart("KV cache", [
    { name: "blocks used", colour: "--series-1" }, { name: "prefix hits", colour: "--series-3" },
  ], percent, { max: 1 }),
};

document.getElementById("main").replaceChildren(
  el("h1", {}, "Live"),
  notice.element,
  el("dl", { class: "tiles" },
    tile("running", "Running"), tile("waiting", "Waiting"), tile("generated", "Generated", "tokens/s"),
    tile("firstToken", "First token"), tile("interToken", "Between tokens"), tile("used", "KV blocks used"),
    tile("hits", "Prefix hits"), tile("preemptions", "Preemptions")),
  el("div", { class: "columns" }, ...Object.values(charts).map((chart) => chart.element)),
  pool.element,
  tables.element,
  request.element,
  facts,
);

let known = null; // the PoolPicture that is shown
let lookedAt = 0; // when, at the earliest, the engine was asked for it
let silence = ""; // why the engine told nothing when it was last asked
let ahead = 0; // seconds by which the server's clock is ahead of this machine's
poll(askLive);
poll(askPool);

async function askLive(signal) {
  let live;
  try {
    live = await requestJson("dashboard/data/live", { signal, patience: PATIENCE });
  } catch (error) {
    if (signal.aborted || !(error instanceof ApiError)) throw error;
    notice.show(error.status === 401 ? explainKey() : error.message);
    return isRefused(error) ? null : SECONDS;
  }
  notice.show(live.ready ? silence : whyNotReady(live));
  ahead = live.time - Date.now() / 1000;
  show(live);
  return SECONDS;
}

async function askPool(signal) {
  try {
    const buffer = await requestBytes(`dashboard/data/pool?known=${known?.number ?? 0}`, { signal, patience: PATIENCE });
    if (buffer.byteLength) {
      known = new PoolPicture(buffer);
      pool.show(known);
    }
    silence = "";
    lookedAt = Date.now() / 1000 + ahead - (known?.secondsUntilNext ?? 0);
    return Math.max(SECONDS, known?.secondsUntilNext ?? 0);
  } catch (error) {
    if (signal.aborted || !(error instanceof ApiError)) throw error;
    silence = error.message;
    return isRefused(error) ? null : SECONDS;
  }
}

/** Without another key there is no other answer. */
function isRefused(error) {
  return error.status === 401 || error.status === 403;
}

function explainKey() {
  const wanted = "enter its admin key above to see what it does.";
  return getKey() === "" ? `This server needs a key: ${wanted}` : `This is not a key of this server: ${wanted}`;
}

function whyNotReady(live) {
  if (live.draining) return "The server is shutting down: it finishes what it has.";
  if (live.info === null) return "The model is loading.";
  return "The engine does not answer.";
}

function show(live) {
  samples.add(live);
  if (live.stats) showStats(live);
  else forgetEngine();
  if (live.info) showFacts(live);
  tables.show(live, known, lookedAt);
}

/** It has said nothing yet, or was lost: what was so is so no more. */
function forgetEngine() {
  for (const name of Object.keys(tiles)) setTile(name, count(null));
  known = null;
  pool.show(null);
}

function showStats(live) {
  const { stats, time } = live;
  const used = stats.num_blocks ? stats.num_used_blocks / stats.num_blocks : null;
  const generated = samples.rate("num_generation_tokens", RATE_SECONDS);
  const firstToken = samples.percentiles("time_to_first_token_seconds", [0.5, 0.95, 0.99], LATENCY_SECONDS);
  const interToken = samples.percentiles("inter_token_latency_seconds", [0.5, 0.95, 0.99], LATENCY_SECONDS);
  const queries = samples.growth("num_prefix_queries", LONG_SECONDS);
  const hits = queries ? samples.growth("num_prefix_hits", LONG_SECONDS) / queries : null;
  const allHits = stats.num_prefix_queries ? stats.num_prefix_hits / stats.num_prefix_queries : null;
  setTile("running", count(stats.num_running));
  setTile("waiting", count(stats.num_waiting), stats.num_starving ? `${stats.num_starving} for very long` : "");
  setTile("generated", count(generated));
  setTile("firstToken", duration(samples.percentiles("time_to_first_token_seconds", [0.5], LONG_SECONDS)[0]), "median, 1 min");
  setTile("interToken", duration(interToken[0]), `median, ${LATENCY_SECONDS} s`);
  setTile("used", percent(used), `${count(stats.num_used_blocks)} of ${count(stats.num_blocks)}`);
  setTile("hits", percent(allHits), `${count(stats.num_prefix_hits)} tokens`);
  setTile("preemptions", count(stats.num_preemptions), `last minute: ${count(samples.growth("num_preemptions", LONG_SECONDS) ?? 0)}`);
  charts.throughput.push(time, [generated, samples.rate("num_prompt_tokens", RATE_SECONDS)]);
  charts.requests.push(time, [stats.num_running, stats.num_waiting]);
  charts.firstToken.push(time, firstToken);
  charts.interToken.push(time, interToken);
  charts.wholeAnswer.push(time, samples.percentiles("e2e_request_latency_seconds", [0.5, 0.95, 0.99], LATENCY_SECONDS));
  charts.queue.push(time, samples.percentiles("request_queue_time_seconds", [0.5, 0.95, 0.99], LATENCY_SECONDS));
  charts.steps.push(time, samples.sharesOfTime(["execute", "schedule", "update", "between"], RATE_SECONDS));
  charts.losses.push(time, ["num_preemptions", "num_evicted_blocks", "num_recomputed_tokens"].map((name) => samples.rate(name, RATE_SECONDS)));
  charts.cache.push(time, [used, hits]);
}

function showFacts({ model, version, info, uptime }) {
  setText(facts, [
    `${model} on Octavo ${version}, up for ${duration(uptime)}`, `${info.device}, ${info.attention_backend} attention`,
    `weights ${info.quantization === "none" ? "not rounded" : info.quantization}`, `KV cache ${info.dtype}, ${bytes(info.kv_cache_bytes)}`,
    `at most ${info.max_model_len.toLocaleString("en")} tokens a request`,
  ].join(" · "));
}

function tile(name, title, unit = "") {
  const value = el("span", { id: `tile-${name}` }, count(null));
  const note = el("small", {});
  tiles[name] = { value, note };
  return el("div", { class: "tile" }, el("dt", {}, title), el("dd", {}, value, unit ? el("small", {}, ` ${unit}`) : null), el("dd", { class: "note" }, note));
}

function setTile(name, value, note = "") {
  setText(tiles[name].value, value);
  setText(tiles[name].note, note);
}

function percentileSeries() {
  return [
    { name: "median", colour: "--series-1" }, { name: "95 %", colour: "--series-2" }, { name: "99 %", colour: "--series-4" },
  ];
}
