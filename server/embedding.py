"""Embeddings: from the body of a request to vectors, by way of an engine that computes each prompt and no answer.

However the caller ends, nothing of the request stays in the engine. Knows no HTTP.
"""

import asyncio
import base64
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.output import FinishReason
from scheduler.sampling_params import SamplingParams
from server.engine_client import EngineClient
from server.errors import InvalidRequest
from server.generation import SequenceFailed
from server.metrics import SequenceRecord, ServerMetrics
from server.protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from server.protocol.fields import parse_body
from server.protocol.responses import PromptTokensDetails, to_json
from server.request_history import RequestTrace
from server.served_model import ServedModel
from server.service_terms import ServiceTerms, Submitter, terms_of
from server.token_ids import TokenIds
from server.truncation import PromptTokens, prompt_tokens_of
from server.update_stream import UpdateStream

_MAX_TOKENS_OF_REQUEST = 300_000  # OpenAI's
FLOAT_BYTES = 4
_PROMPTS_A_LOOK = 32  # that are submitted before the next look whether one of them has failed


@dataclass(frozen=True, slots=True)
class PreparedEmbedding:
    """A request that can be submitted: one vector for each of its prompts."""

    model: str
    prompts: tuple[TokenIds, ...]
    num_truncated_tokens: int  # of all prompts, cut off as asked
    params: SamplingParams
    normalize: bool
    as_base64: bool
    terms: ServiceTerms
    ignored_fields: tuple[str, ...]


def prepare_embedding(body: bytes, model: ServedModel) -> PreparedEmbedding:
    """Read the body of `/v1/embeddings`; runs off the event loop. Raises ApiError for what is wrong with it."""
    request = parse_body(EmbeddingRequest, body)
    model.check_name(request.model)
    if request.dimensions not in (None, model.hidden_size):
        raise InvalidRequest(
            f"dimensions is {request.dimensions}, but the model's vectors have {model.hidden_size} numbers, "
            "and were not trained to be cut.",
            "dimensions",
        )
    prompts = _prompts(request, model)
    return PreparedEmbedding(
        model=request.model or model.names[0],
        prompts=tuple(TokenIds(prompt.token_ids) for prompt in prompts),
        num_truncated_tokens=sum(prompt.num_truncated for prompt in prompts),
        params=SamplingParams(max_tokens=0, temperature=0.0, pooling=request.pooling or "mean"),
        normalize=request.normalize is not False,
        as_base64=request.encoding_format == "base64",
        terms=terms_of(request),
        ignored_fields=tuple(request.ignored_fields()),
    )


def _prompts(request: EmbeddingRequest, model: ServedModel) -> list[PromptTokens]:
    limit = max(_MAX_TOKENS_OF_REQUEST, model.max_model_len)
    add_special_tokens = request.add_special_tokens is not False
    prompts = []
    num_tokens = 0
    for prompt in request.input:
        prompts.append(prompt_tokens_of(request, model, prompt, "input", add_special_tokens=add_special_tokens))
        num_tokens += len(prompts[-1].token_ids)
        if num_tokens > limit:
            raise InvalidRequest(f"input has more than the {limit} tokens that one request may have.", "input")
    return prompts


class EmbeddingRun:
    """One request on its way through the engine."""

    def __init__(
        self,
        request: PreparedEmbedding,
        trace: RequestTrace,
        engine: EngineClient,
        metrics: ServerMetrics,
        arrival: float,
        submitter: Submitter,
    ) -> None:
        """`trace` learns how its prompts end; `arrival` is of time.perf_counter()."""
        self._request = request
        self._trace = trace
        self._engine = engine
        self._metrics = metrics
        self._usage = metrics.usage.of(trace.key_name)
        self._arrival = arrival
        self._submitter = submitter
        self._engine_ids = list(trace.engine_ids())
        self._open: dict[str, int] = {}  # submitted and not ended: number of prompt tokens
        self.num_cached_tokens = 0  # of all prompts: not computed, since their KV blocks were there

    async def pooled(self) -> list[bytes]:
        """Submit, and wait for the pooled hidden states of each prompt: float32, little-endian. To be called once.

        Raises:
            InvalidRequest: if there are more prompts than may wait.
            EngineUnavailable: before anything was submitted, or between two prompts.
            RequestRejected: if the scheduler refuses a prompt.
            RequestDropped: if there is no room or no time for it.
            EngineDied: if the engine is lost on the way.
            SequenceFailed: if the engine could not go on with it.
        """
        end: FinishReason = "abort"  # when the caller goes away
        try:
            self._submitter.refuse_too_many(self._request.prompts, "input")
            streams: list[UpdateStream] = []
            for item in zip(self._engine_ids, self._request.prompts, strict=True):
                if len(streams) % _PROMPTS_A_LOOK == 0:
                    await self._raise_failure(streams)
                streams.append(await self._submit(*item))
            return [await self._wait(*item) for item in zip(self._engine_ids, streams, strict=True)]
        except Exception:
            end = "error"
            raise
        finally:
            for engine_id in list(self._open):
                self._engine.abort(engine_id)
                self._observe_end(engine_id, end)

    async def _submit(self, engine_id: str, prompt: TokenIds) -> UpdateStream:
        arrival_time = time.time() - (time.perf_counter() - self._arrival)
        message = self._submitter.message(engine_id, prompt, self._request.params, self._request.terms, arrival_time)
        stream = self._engine.submit(message)
        self._open[engine_id] = len(prompt)
        self._metrics.observe_n(1)
        await asyncio.sleep(0)  # thousands of prompts in a row would hold up every other request
        return stream

    async def _raise_failure(self, streams: Sequence[UpdateStream]) -> None:
        """One prompt's end by an error is that of the request: the engine need not refuse thousands more."""
        for engine_id, stream in zip(self._engine_ids, streams, strict=False):
            if stream.has_failed:
                await self._wait(engine_id, stream)

    async def _wait(self, engine_id: str, stream: UpdateStream) -> bytes:
        async for update in stream:
            if update.finish_reason is not None:
                self._usage.add_prompt(self._open[engine_id], update.num_cached_tokens)
            if update.finish_reason == "error":
                raise SequenceFailed(f"the prompt of {engine_id} failed in the engine")
            if update.finish_reason is not None:
                self._observe_end(engine_id, update.finish_reason)
                self.num_cached_tokens += update.num_cached_tokens
                await asyncio.sleep(0)  # as above: many may have ended in the meantime
                return update.embedding
        raise AssertionError(f"the updates of {engine_id} ended without an end")

    def _observe_end(self, engine_id: str, reason: FinishReason) -> None:
        self._trace.finish_reasons[reason] += 1
        self._metrics.observe_end(
            SequenceRecord(
                finish_reason=reason,
                num_prompt_tokens=self._open.pop(engine_id),
                num_generation_tokens=0,
                max_tokens=0,
                latency=time.perf_counter() - self._arrival,
                decode_time=None,
            )
        )


def answer_pieces(request: PreparedEmbedding, pooled: Sequence[bytes], num_cached_tokens: int) -> list[bytes]:
    """The answer's body, in pieces: encoded as a whole, large ones would hold up every thread.

    Takes a fraction of a millisecond for each vector. Raises SequenceFailed for one that is not of finite numbers.
    """
    num_tokens = sum(map(len, request.prompts))
    usage = EmbeddingUsage(num_tokens, num_tokens, PromptTokensDetails(num_cached_tokens))
    body = to_json(EmbeddingList(request.model, usage))
    before, _, after = body.rpartition(b"[]")
    pieces = [before + b"["]
    for index, raw in enumerate(pooled):
        vector = _vector(raw, normalize=request.normalize)
        item = to_json(Embedding(index, _encoded(vector, as_base64=request.as_base64)))
        pieces.append(b"," + item if index else item)
    return [*pieces, b"]" + after]


def _vector(raw: bytes, *, normalize: bool) -> bytes:
    """Float32 numbers as they are answered with."""
    values = struct.unpack(f"<{len(raw) // FLOAT_BYTES}f", raw)
    assert values, "a prompt ended without its pooled hidden states"
    length = math.hypot(*values)
    if not math.isfinite(length):
        raise SequenceFailed("the hidden states of a prompt are not finite numbers")
    if not normalize or length == 0.0:
        return raw
    return struct.pack(f"<{len(values)}f", *(value / length for value in values))


def _encoded(vector: bytes, *, as_base64: bool) -> list[float] | str:
    if as_base64:
        return base64.b64encode(vector).decode("ascii")
    return list(struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector))
