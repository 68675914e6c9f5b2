"""`octavo serve` with a probe on its event loop, in a process of its own, for benchmarks/event_loop_gaps.py.

The probe sleeps a millisecond over and over and keeps how long that took, and what of it was the server's doing: the
time for which its process computed, less that for which the loop's thread was ready and got no core. GET
/benchmark/gaps hands the times out and begins anew. Run as a program it is that server. Knows no benchmark.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import transformers
from starlette.types import ASGIApp, Receive, Scope, Send

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.local_server import local_server
from benchmarks.saved_tokenizer import save_tokenizer
from server import app, cli, serve
from server.tokenizer import load_tokenizer
from tests.server.doubles import FakeEngine

GAPS_PATH = "/benchmark/gaps"
WINDOW = 131_072
_STAND_IN = "--stand-in"


class LoopProbe:
    """Times between two turns of a loop, and how much of each was the process's own doing."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._gaps: list[tuple[float, float]] = []  # seconds, seconds of ours
        self._task: asyncio.Task[None] | None = None

    def take(self) -> tuple[list[float], list[float]]:
        """What was kept since the last call, the first of which starts the probe."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        gaps, self._gaps = self._gaps, []
        return [gap for gap, _ in gaps], [own for _, own in gaps]

    async def _run(self) -> None:
        statistics = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        last = _now(statistics)
        while True:
            await asyncio.sleep(0.001)
            now = _now(statistics)
            gap, computed, waited = (end - begin for begin, end in zip(last, now, strict=True))
            # All threads count, for any of them may keep the loop's from running. One that has no core itself keeps
            # it too, and that is the machine's doing.
            self._gaps.append((gap, min(computed, gap - waited)))
            last = now


def _now(statistics: int) -> tuple[float, float, float]:
    """The time, how long the process has computed, and how long this thread was ready to run and had no core."""
    waited = int(os.pread(statistics, 64, 0).split()[1]) / 1e9
    return time.perf_counter(), time.process_time(), waited


class _Probed:
    """The application, and the probe's path beside it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._probe = LoopProbe()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != GAPS_PATH:
            await self._app(scope, receive, send)
            return
        body = json.dumps(self._probe.take()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})


def _stand_in_engine(_config: object, _on_progress: object) -> FakeEngine:
    """Answers every request with one token, at once."""
    engine = FakeEngine(lambda _message, _index: [28])
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, max_model_len=WINDOW, vocab_size=1 << 20)
    return engine


def save_tiny_model(folder: Path, tokenizer_path: Path) -> Path:
    """A model of random weights with a window of 131,072 tokens and the tokenizer of another model."""
    tokenizer = load_tokenizer(tokenizer_path)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@contextmanager
def probed_server(model: Path, *, stand_in: bool) -> Iterator[str]:
    """Serve `model` on a free port; yields the URL."""
    flags = ["--model", str(model)]
    # One prompt at a time has its blocks; the others wait.
    flags += [_STAND_IN] if stand_in else ["--num-gpu-blocks-override", str(WINDOW // 16)]
    with local_server(flags, module="benchmarks.probed_server") as url:
        yield url


def main() -> int:
    """Serve as the command does, with the probe."""
    arguments = sys.argv[1:]
    if _STAND_IN in arguments:
        arguments.remove(_STAND_IN)
        serve.EngineClient = _stand_in_engine  # type: ignore[assignment,misc]
    create_app = app.create_app
    app.create_app = lambda *parts: _Probed(create_app(*parts))  # type: ignore[assignment,return-value]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
