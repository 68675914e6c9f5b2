// Asks the server: with the key that was entered, with errors as sentences, and streams event by event.
// The key lives in this tab's sessionStorage alone. Knows no page.

const KEY = "octavo-key";
const ROOT = new URL("../../", import.meta.url); // of the server, whatever a proxy puts before its paths
const keyChanges = new EventTarget();
const NO_ANSWER = "The server does not answer. It may have been stopped, or the network is down.";
let keyOfPage = ""; // where the browser keeps nothing for pages

/** An answer that is not a success, or none at all: `status` is then 0. */
export class ApiError extends Error {
  constructor(message, status, code = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter; // seconds, where the server says when to come again
  }
}

/** The key that was entered in this tab, or "". */
export function getKey() {
  return storage()?.getItem(KEY) ?? keyOfPage;
}

/** Keeps a key for this tab; "" forgets it. */
export function setKey(key) {
  const kept = storage();
  if (kept === null) keyOfPage = key;
  else if (key === "") kept.removeItem(KEY);
  else kept.setItem(KEY, key);
  keyChanges.dispatchEvent(new Event("change"));
}

/** Calls `listener` whenever another key was entered. */
export function onKeyChange(listener) {
  keyChanges.addEventListener("change", listener);
}

/** The address of a path such as "v1/models" or "dashboard/data/live". */
export function address(path) {
  return new URL(path, ROOT).href;
}

/**
 * The response to a request, once it is known to be a success. `body` is sent as JSON, with POST.
 * Throws ApiError; an aborted request throws the DOMException "AbortError".
 */
export async function request(path, { body, signal, headers = {} } = {}) {
  const sent = new Headers(headers);
  const key = getKey();
  if (key !== "") {
    try {
      sent.set("Authorization", `Bearer ${encodeBytes(key)}`);
    } catch {
      throw new ApiError("This key holds a character that no key can have.", 401);
    }
  }
  const options = { headers: sent, signal, credentials: "omit", cache: "no-store" };
  if (body !== undefined) {
    sent.set("Content-Type", "application/json");
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(address(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(NO_ANSWER, 0);
  }
  if (!response.ok) throw await asError(response);
  return response;
}

/** The JSON of an answer that is whole after at most `patience` seconds, where given. Throws as `request` does. */
export function requestJson(path, options) {
  return whole(path, options, (response) => response.json());
}

/** The bytes of an answer, as an ArrayBuffer, likewise. */
export function requestBytes(path, options) {
  return whole(path, options, (response) => response.arrayBuffer());
}

/**
 * The data of a stream's events, parsed as JSON, as they come; ends with [DONE].
 * `onResponse` is called with the response before the first of them. Throws as `request` does, for an event that
 * tells of an error, and for a stream that ends without that word.
 */
export async function* streamEvents(path, { onResponse, ...options } = {}) {
  const response = await request(path, options);
  onResponse?.(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("The connection ended before the answer was complete.", 0);
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = dataOf(event);
        if (data === "[DONE]") return;
        if (data === "") continue;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(parsed.error.message, response.status, parsed.error.code);
        yield parsed;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // the caller has gone, or the stream is over already
  }
}

/** What `read` makes of an answer: one that breaks off, or is late, is as none at all. */
async function whole(path, { patience = 0, signal, ...options } = {}, read) {
  const controller = new AbortController();
  const stop = () => controller.abort();
  const timer = patience ? setTimeout(stop, 1000 * patience) : 0;
  signal?.addEventListener("abort", stop);
  if (signal?.aborted) stop();
  try {
    return await read(await request(path, { ...options, signal: controller.signal }));
  } catch (error) {
    if (error instanceof ApiError || signal?.aborted) throw error;
    throw new ApiError(NO_ANSWER, 0);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", stop);
  }
}

/** Of this tab; null where the browser forbids it. */
function storage() {
  try {
    return window.sessionStorage;
  } catch {
    return null;
  }
}

function dataOf(event) {
  return event
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
}

async function asError(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  let message = `The server answered with status ${response.status}.`;
  let code = null;
  try {
    const { error } = await response.json();
    message = error.message;
    code = error.code;
  } catch {
    // not from our server: a proxy's own page says nothing for a person here
  }
  return new ApiError(message, response.status, code, retryAfter);
}

/** A header holds bytes: the server reads a key's UTF-8. */
function encodeBytes(key) {
  return String.fromCharCode(...new TextEncoder().encode(key));
}
