"""The check of a card without one: every part as a dry run, the script around them, and the arithmetic of the goals."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_batches import Heads, Rows, contiguous, decodes, make_batch, prefills
from benchmarks.gpu_goals import GOALS, goal_rows, to_markdown
from benchmarks.gpu_results import errors, updated
from benchmarks.machine import ROOT
from kernels.attention.reference import ReferenceBackend
from kernels.attention.tuning import TileTable

pytest.importorskip("triton")

SMALL = Heads(4, 2, 8)
CPU = torch.device("cpu")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_part_runs_dry_and_every_goal_gets_a_number(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.benchmarks.gpu_dry_run", str(tmp_path), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert not errors(result)
    assert [goal.text for goal in GOALS if goal.value(result) is None] == []
    page = (tmp_path / "gpu.md").read_text()
    assert "A dry run" in page
    assert all(f"## {part}" in page for part in result["parts"])
    assert len(TileTable.load(tmp_path / "tiles.json").rows) == len(TileTable.load().rows) + 3


def test_kernel_tests_on_a_card_are_those_of_triton() -> None:
    """Collected as if there were a card: every test is one of Triton's backends, compiled."""
    arguments = ["-p", "tests.kernels.on_card", "--confcutdir=tests/kernels", "--collect-only"]
    pretend = (
        "import sys, torch; torch.cuda.is_available = lambda: True; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = run(sys.executable, "-c", pretend, *arguments, "tests/kernels/test_block_writes.py", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert {name.partition("[")[2].partition("-")[0].rstrip("]") for name in collected} == {"triton"}, done.stdout


def test_script_runs_the_parts_that_are_asked_for(tmp_path: Path) -> None:
    done = run("benchmarks/gpu_check.sh", "--dry-run", "operations", OUT=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("gpu-*.json")
    assert list(json.loads(file.read_text())["parts"]) == ["operations"]
    assert "not measured" in file.with_suffix(".log").read_text()


def test_script_refuses_an_unknown_part(tmp_path: Path) -> None:
    done = run("benchmarks/gpu_check.sh", "--dry-run", "atention", OUT=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 2
    assert "no part atention" in done.stderr


def test_script_notes_a_part_that_hangs_and_goes_on(tmp_path: Path) -> None:
    """A python that sleeps in one part only; the limits are cut to a second."""
    script = (ROOT / "benchmarks/gpu_check.sh").read_text()
    hasty = script.replace("part engine 110", "part engine 1").replace('cd "$(dirname "$0")/.."', f"cd {ROOT}")
    (tmp_path / "check.sh").write_text(hasty)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in *gpu_engine.py) sleep 30 ;; *gpu_results.py) exec {sys.executable} "$@" ;; esac\n'
    )
    python.chmod(0o755)
    done = run("bash", str(tmp_path / "check.sh"), "engine", "operations", OUT=str(tmp_path), PYTHON=str(python))
    assert done.returncode == 1
    assert "== operations" in done.stdout
    (file,) = tmp_path.glob("gpu-*.json")
    assert errors(json.loads(file.read_text())) == ["engine: note"]
    assert "stopped after 1 s" in file.with_suffix(".md").read_text()


def test_goals_have_bounds_on_the_right_side() -> None:
    least = next(goal for goal in GOALS if goal.is_least)
    most = next(goal for goal in GOALS if not goal.is_least)
    for goal, verdicts in ((least, ("MISSED", "met", "met")), (most, ("met", "met", "MISSED"))):
        for factor, verdict in zip((0.9, 1.0, 1.1), verdicts, strict=True):
            result = {"parts": {goal.part: {goal.measurement: {goal.key: goal.limit * factor}}}}
            assert goal_rows(result)[GOALS.index(goal)][3] == verdict
    assert {row[3] for row in goal_rows({"parts": {}})} == {"not measured"}


def test_parts_that_run_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"

    def write(number: int) -> None:
        with updated(path) as result:
            result["parts"].setdefault("checks", {})[str(number)] = {"right": number != 7, "text": "a | b\nc"}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(24)))
    result = json.loads(path.read_text())
    assert len(result["parts"]["checks"]) == 24
    assert errors(result) == ["checks: 7"]
    page = to_markdown(result)
    assert "| 7 | NO | a \\| b c |" in page
    assert path.with_suffix(".md").read_text() == page


def test_bytes_and_operations_of_known_batches() -> None:
    heads = Heads(32, 8, 128)
    decode = make_batch(heads, decodes(2, 32), CPU)
    assert decode.num_bytes == 2 * 32 * 8 * 2 * 128 * 2 + 2 * 2 * 32 * 128 * 2
    assert decode.num_flops == 2 * 4 * 32 * 128 * 32
    quantised = make_batch(heads, decodes(2, 32), CPU, cache_dtype="int8")
    assert quantised.num_bytes == 2 * 32 * 8 * 2 * (128 + 4) + 2 * 2 * 32 * 128 * 2
    # the square of a prompt's queries and keys, its diagonal and the half below it
    assert make_batch(heads, prefills(1, 64), CPU).num_flops == 4 * 128 * 32 * (64 * 65 // 2)
    assert make_batch(heads, Rows((16,), (64,)), CPU).num_flops == 4 * 128 * 32 * sum(range(49, 65))


@pytest.mark.parametrize("rows", [decodes(3, 40), prefills(1, 19), Rows((5, 5), (33, 33))], ids=str)
def test_contiguous_tensors_hold_what_the_blocks_do(rows: Rows) -> None:
    batch = make_batch(SMALL, rows, CPU, dtype=torch.float32)
    query, keys, values = contiguous(batch)
    num_queries, num_keys = query.shape[2], keys.shape[2]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    expected = ReferenceBackend().attend(batch.query, batch.kv_layer, batch.metadata, SMALL.params)
    torch.testing.assert_close(out.transpose(1, 2).flatten(0, 1), expected)
