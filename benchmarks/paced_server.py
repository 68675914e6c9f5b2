"""`octavo serve` with a stand-in for the model, in a process of its own, for benchmarks/edge_cost.py.

The edge, the connection, the engine's loop and the scheduler are the real ones. A step reads a stretch of memory, as a
model reads its weights, so that whatever runs between two steps finds the caches as cold as it would; how long the
processor is busy with that stands in a file. Run as a program with the arguments of the command, and `--pace FILE`, it
is that server; with a descriptor and the file it is the server's engine process.
"""

import asyncio
import mmap
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.runner import ModelRunner
from scheduler.output import KnownRow, NewRow, RowResult, SchedulerOutput, StepResult
from server import cli, engine, engine_client, engine_process
from server.config import engine_environment
from server.engine_builder import DeviceHalf
from server.engine_config import EngineConfig
from server.engine_sizing import fill_in_for, scheduler_config
from server.messages import EngineInfo
from server.preemption_costs import PreemptionCosts
from server.tokenizer import load_tokenizer

PACE = "--pace"
_SECONDS = struct.Struct("<d")
_NOTHING = RowResult()
_WINDOW = 8192
_NUM_BLOCKS = 4096
_BLOCK_SIZE = 16
_READ_BYTES = 96 << 20  # what the default model's weights take at a byte each, about
_TEXT = " ".join(["the model says these words again and again, and a few numbers: 1, 2, 3."] * 8)


class PacedRunner:
    """In place of a ModelRunner: reads memory as a model does, and says one text for ever."""

    def __init__(self, token_ids: list[int], busy: mmap.mmap) -> None:
        """`busy` is where the seconds are counted."""
        self._token_ids = token_ids
        self._num_tokens: dict[int, int] = {}  # of each sequence, those that are known
        self._weights = torch.ones(_READ_BYTES // 4)  # zeros would all be one page
        self._busy = busy
        self._busy_seconds = 0.0
        self._num_steps = 0

    def launch(self, output: SchedulerOutput) -> "PacedRunner":
        """Compute, and keep the result."""
        began = time.thread_time()
        self._weights.sum()
        self._busy_seconds += time.thread_time() - began
        self._busy[: _SECONDS.size] = _SECONDS.pack(self._busy_seconds)
        self._num_steps += 1
        for seq_id in output.finished_seq_ids:
            self._num_tokens.pop(seq_id, None)
        said = RowResult((self._token_ids[self._num_steps % len(self._token_ids)],))
        self._result = StepResult(tuple(said if self._samples(row) else _NOTHING for row in output.rows))
        return self

    def result(self) -> StepResult:
        """Of the step that was launched last."""
        return self._result

    def _samples(self, row: NewRow | KnownRow) -> bool:
        if isinstance(row, NewRow):
            self._num_tokens[row.seq_id] = len(row.token_ids)
        is_due = row.end == self._num_tokens[row.seq_id]
        self._num_tokens[row.seq_id] += is_due
        return is_due


def busy_seconds(path: Path) -> float:
    """How long the stand-in has computed, of the engine's main thread."""
    seconds: float = _SECONDS.unpack(path.read_bytes()[: _SECONDS.size])[0]
    return seconds


def _build_paced_half(path: Path, config: EngineConfig, _: Callable[[str, int, int], None]) -> DeviceHalf:
    """In place of `server.engine_builder.build_device_half`."""
    torch.set_num_threads(1)  # whatever else computes is no model
    device = torch.device("cpu")
    config = fill_in_for(device, config)
    tokenizer = load_tokenizer(Path(config.model_path))
    with path.open("r+b") as file:
        busy = mmap.mmap(file.fileno(), _SECONDS.size)
    token_ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    runner = cast("ModelRunner", PacedRunner(token_ids, busy))
    info = EngineInfo(
        max_model_len=_WINDOW,
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        vocab_size=tokenizer.vocab_size,
        attention_backend="none",
        device="cpu",
        dtype="float32",
        load_seconds=0.0,
        kv_cache_bytes=0,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return DeviceHalf(config, runner, scheduler_config(config, _WINDOW, (), PreemptionCosts()), 0, info)


async def _spawn(path: str, connection: socket.socket) -> asyncio.subprocess.Process:
    """In place of `server.engine_client._spawn`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(connection.fileno()), path),
        pass_fds=[connection.fileno()],
        env=engine_environment(),
        start_new_session=True,
    )


def main() -> int | None:
    """Be the server, or its engine process."""
    if PACE not in sys.argv:
        engine.build_device_half = partial(_build_paced_half, Path(sys.argv.pop()))
        return engine_process.main()
    place = sys.argv.index(PACE)
    _, path = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    engine_client._spawn = partial(_spawn, path)
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
