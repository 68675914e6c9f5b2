"""Compiles the kernels for real GPUs without one: what the interpreter cannot show.

A kernel that spills registers is several times slower, and a release of the compiler can start it. Here a few
instances with the installed Triton; `make kernels` compiles all, for more targets, with two releases.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.interpreted import IS_INTERPRETING, TESTS

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
pytestmark = pytest.mark.skipif(IS_INTERPRETING, reason="the interpreter replaces the compiler")

from tests.kernels import compile_checks  # noqa: E402  (needs Triton)
from tests.kernels.compile_for import Resources  # noqa: E402
from tests.kernels.kernel_launches import Instance  # noqa: E402

TARGETS = ("sm_80", "sm_90")
# Patterns of launches: both tiles and the merge of a large model, its quantised cache, and a few of the rest.
QUICK = (
    r"^(decode|prefill|invariant) 32/8 heads of 128 bfloat16|^decode 32/8 heads of 128 int8"
    r"|^rotated 32/8 heads of 128 (bfloat16|int8)|(added norm|silu|down product|sampler) Llama"
)
GOOD = Instance(
    kernel="attend_kernel",
    name="attend_kernel: prefill 32/8 heads of 128 bfloat16",
    num_warps=4,
    num_stages=2,
    constants={},
    resources=Resources(200, 65536, 0, 0, {"HGMMA": 8, "LDGSTS.128": 16}),
)
RECORDED = {GOOD.name: 200}


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One process for each target, all at work at once."""
    command = [sys.executable, "-m", "tests.kernels.kernel_launches", "--only", QUICK]
    started = {
        target: subprocess.Popen(
            [*command, target],
            cwd=TESTS.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for target in TARGETS
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_kernels(compilers: dict[str, subprocess.Popen[str]], target: str) -> None:
    output, errors = compilers[target].communicate()
    assert compilers[target].returncode == 0, errors[-4000:]
    recorded = compile_checks.recorded_registers(compile_checks.read_budget(), triton.__version__, target)
    instances = [Instance.from_json(line) for line in output.splitlines()]
    assert {"attend_kernel", "merge_kernel", "rotate_and_write_kernel", "sample_kernel"} <= {
        i.kernel for i in instances
    }
    found = {each.name: compile_checks.complaints(each, target, recorded) for each in instances}
    assert not {name: complaints for name, complaints in found.items() if complaints}


def with_resources(**changes: object) -> Instance:
    return dataclasses.replace(GOOD, resources=dataclasses.replace(GOOD.resources, **changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"registers": 199}, None),
        ({"registers": 201}, "201 registers"),
        ({"spill_bytes": 8}, "spills"),
        ({"num_spills": 1}, "spills"),
        ({"shared_bytes": 228 * 1024}, "shared memory"),
        ({"instructions": {"HMMA": 8, "LDGSTS.128": 16}}, "does not use HGMMA"),
        ({"instructions": {"HGMMA": 8, "LDGSTS.128": 16, "LDGSTS.64": 2}}, "less than 128 bits"),
        ({"instructions": {"HGMMA": 8, "LDG.128": 16}}, "asynchronously"),
    ],
)
def test_what_is_complained_of(changes: dict[str, object], complaint: str | None) -> None:
    found = compile_checks.complaints(with_resources(**changes), "sm_90", RECORDED)
    if complaint is None:
        assert not found
    else:
        assert len(found) == 1 and complaint in found[0]


def test_every_instance_needs_a_budget() -> None:
    assert "no recorded budget" in compile_checks.complaints(GOOD, "sm_90", {})[0]


@pytest.mark.parametrize(
    ("version", "registers"), [("3.6.0", 1), ("3.9.1", 2), ("3.7.0", 1), ("3.10.0", 2), ("3.5.0", 1)]
)
def test_a_release_without_a_record_takes_the_one_before_it(version: str, registers: int) -> None:
    budget = {"3.9": {"sm_90": {"a": 2}}, "3.6": {"sm_90": {"a": 1}}}
    assert compile_checks.recorded_registers(budget, version, "sm_90") == {"a": registers}
