"""What is measured at start for the choice between recomputing and swapping, on a tiny model."""

from dataclasses import fields
from pathlib import Path

import pytest

from scheduler.sampling_params import SamplingParams
from server.config import load_settings
from server.engine import build_engine
from server.engine_builder import build_device_half
from server.messages import Submit
from server.preemption_costs import PreemptionCosts, preemption_costs
from server.token_ids import TokenIds
from tests.models.tiny_models import build, save


class Watched:
    """Executes nothing, and knows which steps came."""

    def __init__(self):
        self.steps = []

    def execute(self, output):
        self.steps.append(output)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = save(build("llama"), tmp_path_factory.mktemp("tiny"))
    flags = {"block_size": "4", "num_gpu_blocks_override": "20", "swap_space": "1MiB", "device": "cpu"}
    limits = {"max_num_seqs": "4", "max_num_batched_tokens": "32", "cpu_threads": "1"}
    return load_settings({**flags, **limits}).engine_config(path)


def test_nothing_is_run_where_there_is_nothing_to_choose():
    runner = Watched()
    settings = load_settings({}).engine_config(Path("/m"))
    costs = preemption_costs(runner, settings, 64, num_blocks=8, num_host_blocks=0)
    assert [getattr(costs, field.name) for field in fields(PreemptionCosts)] == [0, 0]
    assert runner.steps == []


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(8, 1), (3, 500), (8, 8)])
def test_the_steps_that_are_timed_use_only_blocks_that_there_are(num_blocks, num_host_blocks):
    runner = Watched()
    settings = load_settings({"max_num_batched_tokens": "64", "block_size": "16"}).engine_config(Path("/m"))
    preemption_costs(runner, settings, 16 * num_blocks, num_blocks, num_host_blocks)
    blocks = [block_id for step in runner.steps for row in step.rows for block_id in row.block_ids]
    moves = [(move.src, move.dst) for step in runner.steps for move in step.swapped_out]
    back = [(move.dst, move.src) for step in runner.steps for move in step.swapped_in]
    assert blocks
    assert moves == back != []
    assert max([*blocks, *(src for src, _ in moves)]) < num_blocks
    assert max(dst for _, dst in moves) < num_host_blocks
    assert len([step for step in runner.steps if step.rows]) == len([s for s in runner.steps if s.finished_seq_ids])


def test_an_engine_with_swap_space_has_measured_both_and_serves(config):
    half = build_device_half(config, lambda *progress: None)
    assert half.num_host_blocks > 0
    assert half.scheduling.recompute_seconds_per_token > 0
    assert half.scheduling.swap_seconds_per_block > 0
    engine = build_engine(config, lambda *progress: None)
    assert engine.stats.num_host_blocks == half.num_host_blocks
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for number in range(4):
        engine.submit(Submit(f"r{number}", TokenIds([5 + number, 6, 7] * 5), params, 0.0))
    tokens = {}
    while engine.has_unfinished:
        for update in engine.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    assert [len(each) for each in tokens.values()] == [12] * 4
    engine.check_integrity()
    assert engine.stats.num_integrity_failures == 0
    engine.close()
