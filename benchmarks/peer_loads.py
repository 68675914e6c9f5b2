"""The loads of peers.py: which clients ask for what, and what one round of it came to. Knows no server by name."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Literal

from benchmarks.baseline import Figures, Round, figures_of
from benchmarks.completion_stream import RequestFailed, TimedAnswer
from benchmarks.packet_client import PacketClient, Packets, read_packets
from benchmarks.prompts import make_prompts

Kind = Literal["completions", "chats"]

NUM_TURNS = 3  # of a conversation
QUESTION_WORDS = 24  # of a turn
_WARM_UP_TOKENS = 8
_WARM_UP_WORDS = 32


@dataclass(frozen=True, slots=True)
class Point:
    """One load: a closed loop of clients that send their next request when the last is answered."""

    kind: Kind
    num_words: int  # of each prompt; of the one system prompt that the chats of a round share
    num_tokens: int  # of each answer
    num_clients: int
    num_jobs: int  # in a round: completions, or conversations of NUM_TURNS turns
    num_rounds: int

    @property
    def label(self) -> str:
        """The load in words, without the number of clients."""
        if self.kind == "chats":
            return f"chats of {NUM_TURNS} turns after {self.num_words} shared words, {self.num_tokens} tokens each"
        return f"{self.num_words}-word prompts, {self.num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and what the user will say in each turn."""

    system: str
    questions: tuple[str, ...]


Job = str | Conversation  # a completion's prompt, or a conversation


@dataclass(frozen=True, slots=True)
class Texts:
    """What is asked at one point in one round, and what is sent before, outside of the clock."""

    warm_up: Job
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one server came to in one round of one load."""

    figures: Figures | None  # None: nothing was answered
    seconds: float
    num_answers: int
    num_prompt_tokens: float  # mean of the answers
    num_cached_tokens: float | None  # mean; None: the server does not say
    client_processors: float  # processors that the clients kept busy
    server_seconds_per_token: float | None  # processor time of all its processes, for each output token
    errors: dict[str, int]  # message -> how often


def make_texts(points: Sequence[Point], num_rounds: int, seed: int) -> dict[tuple[Point, int], Texts]:
    """The texts of every point and round: no two begin alike but the chats of one round, so no cache helps others."""
    visits = [(point, number) for number in range(num_rounds) for point in points if number < point.num_rounds]
    chats = [point for point, _ in visits if point.kind == "chats"]
    num_texts = sum(1 if point.kind == "chats" else 1 + point.num_jobs for point, _ in visits)
    most_words = max(_WARM_UP_WORDS, *(point.num_words for point in points))
    # All are drawn at once, for two of different lengths could begin at the same place otherwise.
    texts = (text.split() for text in make_prompts(num_texts, most_words, seed))
    questions = iter(make_prompts(sum((point.num_jobs + 1) * NUM_TURNS for point in chats), QUESTION_WORDS, seed + 1))
    return {(point, number): _texts_of(point, texts, questions) for point, number in visits}


def _texts_of(point: Point, texts: Iterator[list[str]], questions: Iterator[str]) -> Texts:
    if point.kind == "completions":
        warm_up = " ".join(next(texts)[:_WARM_UP_WORDS])
        return Texts(warm_up, tuple(" ".join(next(texts)[: point.num_words]) for _ in range(point.num_jobs)))
    system = " ".join(next(texts)[: point.num_words])
    conversations = [
        Conversation(system, tuple(next(questions) for _ in range(NUM_TURNS))) for _ in range(point.num_jobs + 1)
    ]
    return Texts(conversations[0], tuple(conversations[1:]))


class Load:
    """One point of one round on one server."""

    def __init__(self, port: int, model: str, point: Point, timeout: float) -> None:
        """Clients of the server on `port`, which wait `timeout` seconds for an answer."""
        self._client = PacketClient(port, timeout)
        self._model = model
        self._point = point

    async def run(self, texts: Texts, server_seconds: Callable[[], float]) -> RoundResult:
        """Warm up, let the clients do all jobs, stop the clock, and read what came."""
        await self._do(texts.warm_up, _WARM_UP_TOKENS)
        computed = server_seconds()
        own = time.process_time()
        begin = time.perf_counter()
        packets = await closed_loop(
            self._point.num_clients, texts.jobs, lambda job: self._do(job, self._point.num_tokens)
        )
        seconds = time.perf_counter() - begin
        own = time.process_time() - own
        computed = server_seconds() - computed
        answers, errors = _read_all(packets, self._point.num_tokens)
        num_tokens = sum(answer.num_output_tokens for answer in answers)
        cached = [answer.num_cached_tokens for answer in answers if answer.num_cached_tokens is not None]
        return RoundResult(
            figures=figures_of(Round(seconds, tuple(answers), ())) if answers else None,
            seconds=seconds,
            num_answers=len(answers),
            num_prompt_tokens=fmean(answer.num_prompt_tokens for answer in answers) if answers else 0.0,
            num_cached_tokens=fmean(cached) if cached else None,
            client_processors=own / seconds,
            server_seconds_per_token=computed / num_tokens if num_tokens else None,
            errors=errors,
        )

    async def _do(self, job: Job, num_tokens: int) -> list[Packets]:
        if isinstance(job, Conversation):
            return await self._talk(job, num_tokens)
        return [await self._client.post("/v1/completions", self._body(num_tokens, prompt=job))]

    async def _talk(self, conversation: Conversation, num_tokens: int) -> list[Packets]:
        """All turns; each sends what was said before, the server's own answers included."""
        messages = [{"role": "system", "content": conversation.system}]
        received: list[Packets] = []
        for question in conversation.questions:
            messages.append({"role": "user", "content": question})
            received.append(await self._client.post("/v1/chat/completions", self._body(num_tokens, messages=messages)))
            try:
                answer = read_packets(received[-1], num_tokens)
            except RequestFailed:
                break  # the last packets tell why
            messages.append({"role": "assistant", "content": answer.text})
        return received

    def _body(self, num_tokens: int, **asked: object) -> dict[str, Any]:
        return {
            "model": self._model,
            **asked,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def closed_loop(
    num_clients: int, jobs: Iterable[Job], do: Callable[[Job], Awaitable[list[Packets]]]
) -> list[Packets]:
    """Let the clients do all jobs, each the next one as soon as its last is done; returns all that came."""
    waiting = iter(jobs)

    async def one_client() -> list[Packets]:
        return list(chain.from_iterable([await do(job) for job in waiting]))

    return list(chain.from_iterable(await asyncio.gather(*(one_client() for _ in range(num_clients)))))


def _read_all(received: Iterable[Packets], num_tokens: int) -> tuple[list[TimedAnswer], dict[str, int]]:
    answers: list[TimedAnswer] = []
    errors: Counter[str] = Counter()
    for packets in received:
        try:
            answers.append(read_packets(packets, num_tokens))
        except RequestFailed as failure:
            errors[str(failure)] += 1
    return answers, dict(errors)
