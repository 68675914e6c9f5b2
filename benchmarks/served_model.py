"""A model as the server would run it, driven step by step in this process, by the scheduler or by hand.

The settings are the server's own flags, and so are the kernels, the weights and the cache. Knows no benchmark.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.decoder import Decoder
from paged_cache.manager import BlockManager
from scheduler.output import KnownRow, NewRow, RowResult, SchedulerOutput
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from server.config import load_settings
from server.engine_builder import build_device_half

_FIRST_SEQ_ID = 1 << 40  # of sequences by hand: far from those that the scheduler numbers


@dataclass(frozen=True, slots=True)
class Step:
    """A step that the scheduler chose."""

    seconds: float  # scheduling, execution and update
    num_rows: int
    num_tokens: int
    part_seconds: Mapping[str, float]  # of the layers' parts; empty where the layers are no single native call


class ServedModel:
    """One model over one KV cache."""

    def __init__(self, path: Path, flags: Mapping[str, Any]) -> None:
        """Load as the server does with these flags (field names of the settings, values as on the command line).

        Raises:
            SettingsError, UnservableSettings, ModelError, BackendUnavailableError: for a person to read.
        """
        half = build_device_half(load_settings(flags).engine_config(path), lambda _stage, _done, _total: None)
        self.info = half.info
        self.config = half.config  # with what was left to the device filled in
        self._runner = half.runner
        # Texts may begin alike by chance: what is measured here must not.
        manager = BlockManager(self.info.num_blocks, self.info.block_size, enable_prefix_caching=False)
        self._scheduler = Scheduler(half.scheduling, manager)
        self._last_seq_id = _FIRST_SEQ_ID
        for thread in half.kv_cache.populate(lambda: False):  # as a server has done that was at rest for a while
            thread.join()

    @property
    def decoder(self) -> Decoder:
        """With its weights, to be read only."""
        return self._runner.model

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Step]:
        """Answer all prompts at once with `num_tokens` each, sampled at a temperature of 1; the steps it took."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._scheduler.add(Request(str(number), tuple(prompt), params, arrival_time=float(number)))
        steps = []
        layers = self.decoder.native_layers
        while self._scheduler.has_unfinished:
            if layers is not None:
                layers.measure()
            begin = time.perf_counter()
            output = self._scheduler.schedule()
            self._scheduler.update(output, self._runner.execute(output))
            seconds = time.perf_counter() - begin
            parts = {} if layers is None else layers.part_seconds()
            steps.append(Step(seconds, len(output.rows), output.num_tokens, parts))
        self._scheduler.ledger.take_ended()
        return steps

    def start(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        block_ids: Sequence[int],
        num_computed: int,
        num_new: int,
    ) -> RowResult:
        """Begin a sequence by hand, of which `num_computed` tokens are in its blocks, with `num_new` more of them."""
        self._last_seq_id += 1
        row = NewRow(
            self._last_seq_id, 0, tuple(token_ids), len(token_ids), params, tuple(block_ids), num_computed, num_new
        )
        return self._execute(SchedulerOutput((row,)))[0]

    def proceed(self, num_computed: int, num_new: int) -> RowResult:
        """The next tokens of the sequence that was begun last."""
        row = KnownRow(self._last_seq_id, (), None, num_computed, num_new)
        return self._execute(SchedulerOutput((row,)))[0]

    def finish(self) -> None:
        """Forget that sequence. Its keys and values stay in its blocks until others take them."""
        self._execute(SchedulerOutput((), finished_seq_ids=(self._last_seq_id,)))

    def _execute(self, output: SchedulerOutput) -> tuple[RowResult, ...]:
        return self._runner.execute(output).rows
