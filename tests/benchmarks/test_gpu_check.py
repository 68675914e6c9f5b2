"""The check of a card without one: every part as a dry run, the script around them, and the arithmetic of the goals."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import gpu_kernel_tests
from benchmarks.gpu_batches import Heads, Rows, bytes_per_key, contiguous, decodes, make_batch, prefills, random_layer
from benchmarks.gpu_goals import GOALS, goal_rows, to_markdown
from benchmarks.gpu_part import WROTE_ERRORS, Part, run_part
from benchmarks.gpu_results import errors, updated
from benchmarks.gpu_timing import make_timer
from benchmarks.machine import ROOT, write_whole
from kernels.attention.reference import ReferenceBackend
from kernels.attention.tuning import TileTable

pytest.importorskip("triton", reason="Triton has no build for this platform")

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
    compared = [values for values in result["parts"]["transformers"].values() if "ours_over_theirs" in values]
    assert compared
    assert all("paged|" in values["their_attention"] for values in compared)
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


def run_with_fake_engine(
    folder: Path, engine: str, *parts: str, changes: dict[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The script with lines changed, and a python that does something else for the engine and nothing for others.

    Returns:
        What ran, and the results.
    """
    script = (ROOT / "benchmarks/gpu_check.sh").read_text()
    for old, new in {'"$(dirname "$0")/.."': str(ROOT), **(changes or {})}.items():
        assert old in script
        script = script.replace(old, new)
    (folder / "check.sh").write_text(script)
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in *gpu_engine.py) {engine} ;; *gpu_results.py) exec {sys.executable} "$@" ;; esac\n'
    )
    python.chmod(0o755)
    done = run("bash", str(folder / "check.sh"), *parts, OUT=str(folder), PYTHON=str(python))
    (file,) = folder.glob("gpu-*.json")
    return done, file


def test_script_notes_a_part_that_hangs_and_goes_on(tmp_path: Path) -> None:
    changes = {"part engine 110": "part engine 1"}
    done, file = run_with_fake_engine(tmp_path, "sleep 30", "engine", "operations", changes=changes)
    assert done.returncode == 1
    assert "== operations" in done.stdout
    assert errors(json.loads(file.read_text())) == ["engine: note"]
    assert "stopped after 1 s" in file.with_suffix(".md").read_text()


@pytest.mark.parametrize(("status", "expected", "noted"), [(1, 1, ["engine: note"]), (WROTE_ERRORS, 0, []), (0, 0, [])])
def test_script_notes_a_part_that_crashes(tmp_path: Path, status: int, expected: int, noted: list[str]) -> None:
    """1 is how Python ends of an exception; WROTE_ERRORS says that the part has written it down, here nothing."""
    done, file = run_with_fake_engine(tmp_path, f"exit {status}", "engine")
    assert done.returncode == expected
    assert errors(json.loads(file.read_text())) == noted


def test_script_says_what_it_skipped(tmp_path: Path) -> None:
    changes = {"compute-sanitizer ||": "no-such-tool ||", "/bin/compute-sanitizer": "/bin/no-such-tool"}
    done, file = run_with_fake_engine(tmp_path, "exit 0", "memcheck", changes=changes)
    assert done.returncode == 0
    parts = json.loads(file.read_text())["parts"]
    assert parts == {"memcheck": {"skipped": {"note": "compute-sanitizer is not installed"}}}
    assert "compute-sanitizer is not installed" in file.with_suffix(".md").read_text()


def test_part_that_crashes_writes_it_down_and_keeps_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(part: Part) -> None:
        part.record("first", {"us": 1.0})
        raise ValueError("between measurements")

    monkeypatch.setattr("benchmarks.gpu_part.repair_interpreter", lambda: None)
    path = tmp_path / "gpu.json"
    assert run_part("some", "", measure, ["--dry-run", "--results", str(path)]) == WROTE_ERRORS
    written = json.loads(path.read_text())["parts"]["some"]
    assert written == {"first": {"us": 1.0}, "part": {"error": "ValueError: between measurements"}}


def test_kernel_tests_that_are_stopped_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for pytest that says what pytest says, then hangs in a child of its own."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
cat <<END
tests/kernels/test_a.py::test_one[4-float16] PASSED                [  1%]
tests/kernels/test_a.py::test_two SKIPPED (why (not))              [ 20%]
tests/kernels/test_a.py::test_two[a b] FAILED [ 40%]
tests/kernels/test_a.py::test_three PASSED [ 60%]
tests/kernels/test_a.py::test_three ERROR [ 60%]
tests/kernels/test_a.py::test_four PASSED[ 80%]
END
sleep 60 &
echo $! > {tmp_path}/child
printf 'tests/kernels/test_a.py::test_five '
wait
"""
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    is_right, values = gpu_kernel_tests.run_tests([], 2.0)
    assert not is_right
    assert values == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failures": "test_a.py::test_two[a b], test_a.py::test_three",
        "note": "stopped before the end",
    }
    assert has_ended(int((tmp_path / "child").read_text()))


def test_kernel_tests_end_with_their_part(tmp_path: Path) -> None:
    """The children are in a session of their own, so the signal that ends the part does not reach them by itself."""
    sleeper = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from pathlib import Path; from benchmarks.gpu_kernel_tests import run_in_session; "
        f"run_in_session([sys.executable, '-c', {sleeper!r}], Path({str(tmp_path / 'log')!r}), None)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as part:
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            assert part.poll() is None
            time.sleep(0.05)
        part.terminate()
    assert part.returncode == 128 + signal.SIGTERM
    assert has_ended(int((tmp_path / "child").read_text()))


def has_ended(pid: int) -> bool:
    """Whether a process ends within seconds: a signal takes its time, and the dead wait for their parent."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_outcomes_of_several_processes_are_read() -> None:
    text = """scheduling tests via LoadScheduling

tests/kernels/test_a.py::test_one[4-float16]
tests/kernels/test_a.py::test_two
[gw0] [  3%] PASSED tests/kernels/test_a.py::test_one[4-float16]
[gw11] [100%] FAILED tests/kernels/test_a.py::test_two[a b]
[gw1] [ 50%] SKIPPED tests/kernels/test_a.py::test_three
"""
    file = "tests/kernels/test_a.py"
    assert gpu_kernel_tests.outcomes(text) == {
        f"{file}::test_one[4-float16]": "passed",
        f"{file}::test_two[a b]": "failed",
        f"{file}::test_three": "skipped",
    }


def test_torch_that_disagrees_is_not_compared() -> None:
    from benchmarks.gpu_attention import time_sdpa

    batch = make_batch(SMALL, prefills(1, 9), CPU, dtype=torch.float32)
    query, keys, values = contiguous(batch)
    paged = ReferenceBackend().attend(batch.query, batch.kv_layer, batch.metadata, SMALL.params)
    paged = paged.unflatten(0, (1, -1)).transpose(1, 2)
    timer = make_timer(CPU)
    assert time_sdpa(timer, SDPBackend.MATH, query, keys, values, paged) is not None
    assert time_sdpa(timer, SDPBackend.MATH, query, keys, values, paged + 1) is None


def test_no_two_candidates_are_the_same_kernel() -> None:
    """Of n stages the gather of a block table gets (n - 1) // 2."""
    from benchmarks.tune_candidates import candidates, jobs

    for job in jobs():
        found = [(c.query_rows, c.keys, c.num_warps, (c.num_stages - 1) // 2) for c in candidates(job)]
        assert len(set(found)) == len(found) > 0, job.name


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
    assert sorted(file.name for file in path.parent.iterdir()) == ["gpu.json", "gpu.md"]  # no lock, no half a file
    page = to_markdown(result)
    assert "| 7 | NO | a \\| b c |" in page
    assert path.with_suffix(".md").read_text() == page


def test_results_are_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.json"
    write_whole(path, "before")

    def stopped(*_: object, **__: object) -> None:
        path.with_name(f".gpu.json.{os.getpid()}").open("w").close()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_and_operations_of_known_batches() -> None:
    heads = Heads(32, 8, 128)
    decode = make_batch(heads, decodes(2, 32), CPU)
    assert decode.num_bytes == 2 * 32 * 8 * 2 * 128 * 2 + 2 * 2 * 32 * 128 * 2
    assert decode.num_flops == 2 * 4 * 32 * 128 * 32
    quantised = make_batch(heads, decodes(2, 32), CPU, cache_dtype="int8")
    assert quantised.num_bytes == 2 * 32 * 8 * 2 * (128 + 4) + 2 * 2 * 32 * 128 * 2
    layers = {dtype: random_layer(heads, 1, 16, CPU, dtype) for dtype in ("bfloat16", "float8_e4m3fn")}
    assert {dtype: bytes_per_key(heads, layer) for dtype, layer in layers.items()} == {
        "bfloat16": 2 * 2 * 128,
        "float8_e4m3fn": 2 * (128 + 4),
    }
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
