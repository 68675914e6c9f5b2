// The page "Live": asks for the server's state once a second while it is seen, and shows it.

import { ApiError, getKey, onKeyChange, requestBytes, requestJson } from "./api.js";
import { LineChart } from "./chart.js";
import { el, setText } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { PoolPicture } from "./pool_picture.js";
import { PoolView } from "./pool_view.js";
import { RequestTables } from "./request_tables.js";
import { RequestView } from "./request_view.js";
import { Samples } from "./samples.js";
import { mountShell, noticeArea } from "./shell.js";

const SECONDS = 1;
const RATE_SECONDS = 3; // that a rate is the mean of
const LATENCY_SECONDS = 15; // whose values make percentiles
const LONG_SECONDS = 60; // of what is rarer

mountShell("live");

const samples = new Samples();
const notice = noticeArea();
const request = new RequestView((id) => pool.highlight(id));
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
    { name: "preempted sequences", colour: "--series-2" }, { name: "evicted blocks", colour: "--series-3" },
    { name: "tokens computed again", colour: "--series-4" },
  ], count),
  cache: new LineChart("KV cache", [
    { name: "blocks used", colour: "--series-1" }, { name: "prefix tokens found", colour: "--series-3" },
  ], percent, { max: 1 }),
};

document.getElementById("main").replaceChildren(
  el("h1", {}, "Live"),
  notice.element,
  el("dl", { class: "tiles" },
    tile("running", "Running"), tile("waiting", "Waiting"), tile("generated", "Generated tokens", "/s"),
    tile("firstToken", "First token, median"), tile("interToken", "Between tokens, median"), tile("used", "KV blocks used"),
    tile("hits", "Prefix tokens found"), tile("preemptions", "Preemptions")),
  el("div", { class: "columns" }, ...Object.values(charts).map((chart) => chart.element)),
  pool.element,
  tables.element,
  request.element,
  facts,
);

let timer = 0;
let known = null; // the PoolPicture that is shown
let nextPool = 0; // when there is a newer one
onKeyChange(watch);
document.addEventListener("visibilitychange", watch);
watch();

/** Asks now, and once a second from then on, while the page is seen. */
async function watch() {
  clearTimeout(timer);
  if (document.hidden) return;
  const turn = {};
  watch.turn = turn;
  try {
    const [live, picture] = await Promise.all([requestJson("dashboard/data/live"), newestPool()]);
    if (watch.turn !== turn) return; // another one was begun meanwhile
    notice.show(live.ready ? "" : whyNotReady(live));
    show(live, picture);
  } catch (error) {
    if (watch.turn !== turn) return;
    if (!(error instanceof ApiError)) throw error;
    notice.show(error.status === 401 ? explainKey() : error.message);
    if (error.status === 401 || error.status === 403) return; // until another key is entered
  }
  timer = setTimeout(watch, SECONDS * 1000);
}

async function newestPool() {
  if (known !== null && performance.now() < nextPool) return known;
  let buffer;
  try {
    buffer = await requestBytes(`dashboard/data/pool?known=${known?.number ?? 0}`);
  } catch (error) {
    if (error.status === 503) return known; // it loads, or is lost for a moment: the rest of the page goes on
    throw error;
  }
  if (buffer.byteLength) known = new PoolPicture(buffer);
  nextPool = performance.now() + 1000 * (known.secondsUntilNext - SECONDS / 2);
  return known;
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

function show(live, picture) {
  const before = samples.list.length;
  samples.add(live);
  if (before > 1 && samples.list.length === 1) for (const chart of Object.values(charts)) chart.clear();
  if (live.stats) showStats(live);
  if (live.info) showFacts(live);
  if (picture) pool.show(picture);
  tables.show(live, picture);
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
  setTile("firstToken", duration(samples.percentiles("time_to_first_token_seconds", [0.5], LONG_SECONDS)[0]), "of the last minute");
  setTile("interToken", duration(interToken[0]));
  setTile("used", percent(used), `${count(stats.num_used_blocks)} of ${count(stats.num_blocks)}`);
  setTile("hits", percent(allHits), `${count(stats.num_prefix_hits)} tokens`);
  setTile("preemptions", count(stats.num_preemptions), `${count(samples.growth("num_preemptions", LONG_SECONDS) ?? 0)} in the last minute`);
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
  const value = el("span", { id: `tile-${name}` }, "–");
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
