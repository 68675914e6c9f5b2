// Asks the server: with the key that was entered, with errors as sentences, and streams event by event.
// The key lives in this tab's sessionStorage alone. Knows no page.

const KEY = "octavo-key";
const ROOT = new URL("../../", import.meta.url); // of the server, whatever a proxy puts before its paths
const keyChanges = new EventTarget();

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
  return sessionStorage.getItem(KEY) ?? "";
}

/** Keeps a key for this tab; "" forgets it. */
export function setKey(key) {
  if (key === "") sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
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
    throw new ApiError("The server does not answer. It may have been stopped, or the network is down.", 0);
  }
  if (!response.ok) throw await asError(response);
  return response;
}

/** The JSON of an answer. Throws as `request` does. */
export async function requestJson(path, options) {
  return await (await request(path, options)).json();
}

/** The bytes of an answer, as an ArrayBuffer. Throws as `request` does. */
export async function requestBytes(path, options) {
  return await (await request(path, options)).arrayBuffer();
}

/**
 * The data of a stream's events, parsed as JSON, as they come; ends with [DONE] or the stream.
 * `onResponse` is called with the response before the first of them. Throws as `request` does, and for an event that
 * tells of an error.
 */
export async function* streamEvents(path, { onResponse, ...options } = {}) {
  const response = await request(path, options);
  onResponse?.(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
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
