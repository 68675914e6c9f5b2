"""Stand-ins for the engine and for a model's tokenizer, so that the edge is tested without either. Deterministic."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import httpx
import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers, processors

from scheduler.grammar import Vocabulary
from scheduler.output import SequenceFailure, SequenceUpdate, TokenLogprobs
from scheduler.pool_report import BlockHolder, PoolReport
from scheduler.request_report import RequestReport
from scheduler.sampling_params import StructuredOutput
from server.app import create_app
from server.config import Settings
from server.engine_errors import EngineDied, EngineUnavailable, RequestDropped, RequestRejected
from server.grammar_trial_process import Outcome
from server.messages import EngineInfo, EngineStats, PoolInspection, Submit
from server.tokenizer import Tokenizer
from server.tokenizer_parts import TokenizerParts
from server.update_stream import UpdateStream

MAX_MODEL_LEN = 256
HIDDEN_SIZE = 4
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = _CHAT_TEMPLATE, *, adds_bos: bool = False, marks: Sequence[str] = ()
) -> Tokenizer:
    """Token n is byte n; then come two special tokens. With `adds_bos` a plain prompt begins with the first of them.

    `marks` are further special tokens, from 258 on.
    """
    alphabet = _byte_level_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", *marks])
    special_token_ids = frozenset(range(256, 258 + len(marks)))
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
        )
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            spelling="byte_level",
            byte_fallback=False,
            literal_ids=special_token_ids,
            special_token_ids=special_token_ids,
            eos_token_ids=(257,),
            chat_templates={} if chat_template is None else {"default": chat_template},
        )
    )


EOS = 257


def _byte_level_alphabet() -> dict[int, str]:
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def echo_reversed(message: Submit, index: int) -> list[int]:
    """By default an engine answers with the prompt's tokens backwards, rotated by the sequence's index, then ends."""
    tokens = list(reversed(message.prompt_token_ids))
    return [*tokens[index:], *tokens[:index], EOS]


def says(text: str, *, ends: bool = True) -> Callable[[Submit, int], list[int]]:
    """Every sequence says the same."""
    return lambda _message, _index: [*text.encode(), *([EOS] if ends else [])]


class FakeEngine:
    """An engine in this process: what the routes see of EngineClient, with scripted answers."""

    def __init__(
        self,
        script: Callable[[Submit, int], list[int]] = echo_reversed,
        chunks: Sequence[int] = (1,),
        step_seconds: float = 0.0,
        bursts: bool = False,
    ) -> None:
        self.script = script
        self.chunks = chunks  # tokens per update, over and over
        self.step_seconds = step_seconds
        self.bursts = bursts  # all updates at once, before anyone can react to the first
        self.dies_after: int | None = None  # updates
        self.rejects: str | None = None  # the message
        self.lacks: str | None = None  # the message of a refusal that is not the request's fault
        self.drops: RequestDropped | None = None  # before its first update, or after `dies_after` of them
        self.failure: SequenceFailure | None = None  # in place of the last update of each sequence
        self.logprob_of: Callable[[int], float] = lambda _token_id: -0.5
        self.num_cached_tokens = 0  # of each prompt
        self.num_recomputed_tokens = 0  # of each sequence
        self.is_down = False
        self.num_restarts = 0
        self.draining = False
        self.is_hung = False
        self.failed = asyncio.Event()
        self.on_report: Callable[[RequestReport], None] | None = None
        self.report_of: Callable[[Submit, bool], RequestReport] = report_of  # of a request; whether it has ended
        self.info: EngineInfo | None = EngineInfo(
            max_model_len=MAX_MODEL_LEN,
            num_blocks=64,
            block_size=16,
            vocab_size=300,
            attention_backend="fake",
            device="cpu",
            dtype="float32",
            load_seconds=0.0,
            kv_cache_bytes=1 << 20,
            hidden_size=HIDDEN_SIZE,
            enable_prefix_caching=True,
        )
        self.counts = SimpleNamespace(prompt=0, generation=0)
        self.submitted: list[Submit] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.num_updates = 0
        self.num_blocks = 64
        self._streams: dict[str, UpdateStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def ready(self) -> bool:
        return self.info is not None and not (self.is_hung or self.is_down or self.draining)

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    @property
    def open_requests(self) -> list[str]:
        return list(self._streams)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._streams),
            num_waiting=0,
            num_blocks=64,
            num_used_blocks=16,
            num_steps=self.num_updates,
            num_preemptions=0,
            num_prompt_tokens=self.counts.prompt,
            num_generation_tokens=self.counts.generation,
            num_recomputed_tokens=0,
        )

    async def start(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    async def stop(self, timeout: float) -> None:
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout)
        for request_id in list(self._streams):
            self._fail(request_id, EngineDied("The server is shutting down."))

    def submit(self, message: Submit) -> UpdateStream:
        if self.draining or self.is_down:
            raise EngineUnavailable("The engine is down.")
        assert message.request_id not in self._streams
        self.submitted.append(message)
        stream = self._streams[message.request_id] = UpdateStream(message.params.n)
        self._tasks[message.request_id] = asyncio.create_task(self._run(message, stream))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self.aborted.append((request_id, index))
        stream.close(index)
        if not stream.is_open:
            self._tasks[request_id].cancel()
            self._forget(request_id)

    async def inspect(self, request_ids: Sequence[str]) -> list[RequestReport]:
        if self.is_down:
            raise EngineUnavailable("The engine is down.")
        live = [message for message in self.submitted if message.request_id in self._streams]
        return [self.report_of(message, False) for message in live if message.request_id in request_ids]

    async def inspect_pool(self) -> PoolInspection:
        """Each live request holds a block."""
        if self.is_down:
            raise EngineUnavailable("The engine is down.")
        live = list(enumerate(m for m in self.submitted if m.request_id in self._streams))
        holders = tuple(BlockHolder(m.request_id, m.tenant, 0, len(m.prompt_token_ids), 16, 16, 1) for _, m in live)
        block_ids = struct.pack(f"={len(live)}i", *(block_id for block_id, _ in live))
        return PoolInspection(1, PoolReport(16, bytes(self.num_blocks), holders, block_ids), 0.0)

    def _forget(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None and self.on_report is not None:
            message = next(m for m in reversed(self.submitted) if m.request_id == request_id)
            self.on_report(self.report_of(message, True))
        self._tasks.pop(request_id, None)

    def _fail(self, request_id: str, error: Exception) -> None:
        self._streams[request_id].fail(error)
        self._tasks[request_id].cancel()
        self._forget(request_id)

    async def _run(self, message: Submit, stream: UpdateStream) -> None:
        params = message.params
        await asyncio.sleep(self.step_seconds)
        if self.rejects is not None:
            self._fail(message.request_id, RequestRejected(self.rejects, "max_tokens"))
            return
        if self.lacks is not None:
            self._fail(message.request_id, EngineUnavailable(self.lacks))
            return
        if self.drops is not None and self.dies_after is None:
            self._fail(message.request_id, self.drops)
            return
        self.counts.prompt += len(message.prompt_token_ids)
        for start in range(1, len(message.prompt_token_ids), 3) if params.prompt_logprobs is not None else ():
            scores = [self._score(t, params.prompt_logprobs or 0) for t in message.prompt_token_ids[start : start + 3]]
            stream.put(SequenceUpdate(message.request_id, 0, prompt_logprobs=tuple(scores)))
        sources = {index: self._updates(message, index) for index in range(params.n)}
        while sources:
            for index in list(sources):
                if not self.bursts:
                    await asyncio.sleep(self.step_seconds)
                if self.dies_after is not None and self.num_updates >= self.dies_after:
                    self._fail(message.request_id, self.drops or EngineDied("The engine process died."))
                    return
                self.num_updates += 1
                update = sources[index].pop(0)
                self.counts.generation += len(update.token_ids)
                stream.put(update)
                if update.finish_reason is not None:
                    del sources[index]
        self._forget(message.request_id)

    def _updates(self, message: Submit, index: int) -> list[SequenceUpdate]:
        params = message.params
        if params.pooling is not None:
            states = pooled(message)
            cached = self.num_cached_tokens
            return [
                SequenceUpdate(
                    message.request_id, index, finish_reason="stop", embedding=states, num_cached_tokens=cached
                )
            ]
        tokens = self.script(message, index)
        enders = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        end = next((i + 1 for i, t in enumerate(tokens) if t in enders), len(tokens))
        stopped = 0 < end <= params.max_tokens and tokens[end - 1] in enders
        tokens = tokens[: min(end, params.max_tokens)]
        updates: list[SequenceUpdate] = []
        position = 0
        while position < len(tokens) or not updates:
            size = self.chunks[len(updates) % len(self.chunks)]
            part = tuple(tokens[position : position + size])
            position += size
            is_last = position >= len(tokens)
            updates.append(
                SequenceUpdate(
                    request_id=message.request_id,
                    index=index,
                    token_ids=part,
                    logprobs=() if params.logprobs is None else tuple(self._score(t, params.logprobs) for t in part),
                    finish_reason=("stop" if stopped else "length") if is_last else None,
                    stop_token_id=part[-1] if is_last and stopped else None,
                    num_cached_tokens=self.num_cached_tokens if index == 0 else 0,
                    num_recomputed_tokens=self.num_recomputed_tokens if is_last else 0,
                )
            )
        if self.failure is not None:
            failed = SequenceUpdate(message.request_id, index, finish_reason="error", failure=self.failure)
            updates[-1] = failed
        return updates

    def _score(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Made up, but the same for the same token."""
        logprob = self.logprob_of(token_id)
        return TokenLogprobs(token_id, logprob, tuple(((token_id + i) % 256, logprob - i) for i in range(num_top)))


def report_of(message: Submit, has_ended: bool) -> RequestReport:
    """Made up: it waited for a second, and was admitted; half of its prompt was cached."""
    queued = message.arrival_time
    return RequestReport(
        request_id=message.request_id,
        tenant=message.tenant,
        priority=message.priority,
        state="finished" if has_ended else "running",
        arrival_time=queued,
        queued_time=queued,
        report_time=queued + 3,
        num_prompt_tokens=len(message.prompt_token_ids),
        wait_seconds={"behind_others": 1.0},
        admitted_time=queued + 1,
        first_token_time=queued + 1.5,
        ended_time=queued + 3 if has_ended else None,
        num_cached_tokens=len(message.prompt_token_ids) // 2,
    )


def pooled(message: Submit) -> bytes:
    """Made up hidden states, [HIDDEN_SIZE] of each token, pooled as the request wants it."""
    states = [(token_id + 1.0, -token_id / 7, 0.5, 0.0) for token_id in message.prompt_token_ids]
    if message.params.pooling == "mean":
        states = [tuple(sum(column) / len(states) for column in zip(*states, strict=True))]
    return struct.pack("<4f", *states[-1])


def make_app(engine: FakeEngine, *, tokenizer: Tokenizer | None = None, **settings: object) -> FastAPI:
    """The application over a fake engine."""
    chosen = {"model": "byte-model", **settings}
    return create_app(engine, tokenizer or byte_tokenizer(), Settings(**chosen))  # type: ignore[arg-type]


def client_of(app: FastAPI, **options: object) -> httpx.AsyncClient:
    """An HTTP client without a socket."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://test", **options)  # type: ignore[arg-type]


def bytes_vocabulary() -> Vocabulary:
    """Every byte as a token."""
    return Vocabulary([bytes([byte]) for byte in range(256)], (), lambda text: list(text.encode()))


class Trials:
    """In place of GrammarTrials: starts no process, refuses what it is told to, and finds all of one size."""

    num_bytes = 0
    is_shortage = False
    is_closed = False

    def __init__(self, refuse: Callable[[StructuredOutput], str | None] = lambda wanted: None) -> None:
        self._refuse = refuse

    def __call__(self, vocabulary: Vocabulary, vocab_size: int) -> "Trials":
        return self

    def try_out(self, wanted: StructuredOutput) -> Outcome:
        return Outcome(self._refuse(wanted), self.num_bytes, self.is_shortage)

    def close(self) -> None:
        self.is_closed = True
