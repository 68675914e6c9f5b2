// Asks for a completion or a chat answer as a stream, and hands on each token with its log-probability.
// Evens out what differs between the two APIs; knows no page.

import { ApiError, streamEvents } from "./api.js";

export const NUM_TOP = 5; // likely tokens that are told at each place

/**
 * The events of one answer: {tokens: [...], text} as they come, then {usage} and {finishReason}. `onResponse` is called
 * when it begins.
 * A token is {text, bytes, logprob, top: [{text, bytes, logprob}]}; `options` are max_tokens and the like.
 * `input` is a prompt, or the messages of a chat. Throws as `streamEvents` does.
 */
export async function* streamAnswer(input, options, { signal, requestId, onResponse }) {
  const isChat = Array.isArray(input);
  const body = { ...options, stream: true, stream_options: { include_usage: true } };
  if (isChat) Object.assign(body, { messages: input, logprobs: true, top_logprobs: NUM_TOP });
  else Object.assign(body, { prompt: input, logprobs: NUM_TOP });
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  const headers = { "x-request-id": requestId };
  for await (const event of streamEvents(path, { body, signal, headers, onResponse })) {
    const choice = event.choices?.[0];
    if (choice) {
      const text = (isChat ? choice.delta.content : choice.text) ?? "";
      yield { tokens: isChat ? chatTokens(choice.logprobs) : completionTokens(choice.logprobs), text };
      if (choice.finish_reason) yield { finishReason: choice.finish_reason };
    }
    if (event.usage) yield { usage: event.usage };
  }
}

/** An id for a request that the server takes over, so that its story can be asked for at once. */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `playground-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** What a token says, for a reader; bytes that are no text by themselves are spelled out. */
export function spell({ text, bytes }) {
  if (!bytes) return text;
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

/** A sentence for whatever went wrong, or null where the user has stopped it. */
export function explainFailure(error) {
  if (error.name === "AbortError") return null;
  if (error instanceof ApiError) {
    if (error.status === 401) return "This server needs a key: enter it above.";
    const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    return error.message + again;
  }
  if (error instanceof TypeError) return "The connection to the server was lost before the answer was complete.";
  throw error;
}

function chatTokens(logprobs) {
  return (logprobs?.content ?? []).map(({ token, bytes, logprob, top_logprobs: top }) => ({
    text: token, bytes, logprob, top: top.map((other) => ({ text: other.token, bytes: other.bytes, logprob: other.logprob })),
  }));
}

function completionTokens(logprobs) {
  if (!logprobs) return [];
  return logprobs.tokens.map((text, i) => {
    const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ text: other, bytes: null, logprob }));
    top.sort((a, b) => b.logprob - a.logprob);
    return { text, bytes: logprobs.bytes?.[i] ?? null, logprob: logprobs.token_logprobs[i], top };
  });
}
