"""Runs the real `serve` over a real socket with a fake engine. Started by test_serve as a process of its own.

Arguments: flags of `octavo serve`. The engine says "x" for ever, one token every 20 ms.
"""

import sys
from pathlib import Path

from server import cli, preparer, serve, tokenizer
from server.messages import LoadProgress
from server.preparer import Preparer
from server.tokenizer import Tokenizer
from tests.server.doubles import FakeEngine, byte_tokenizer


def start_engine(_config: object, on_progress) -> FakeEngine:
    on_progress(LoadProgress("weights", 1, 2))
    return FakeEngine(lambda message, _index: [120] * message.params.max_tokens, step_seconds=0.02)


def prepare_here(_path: Path, known: Tokenizer, *_log_options: str) -> Preparer:
    return Preparer(None, known)


if __name__ == "__main__":
    serve.EngineClient = start_engine  # type: ignore[misc]
    serve.resolve = lambda *_: Path("byte-model")
    tokenizer.load_tokenizer = lambda _: byte_tokenizer()
    preparer.Preparer = prepare_here  # type: ignore[misc, assignment]
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
