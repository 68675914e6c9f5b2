"""The sampler benchmark measures every operation on every number of rows, and writes what it prints."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.sampler_cost import LOGPROBS, SETTINGS, main
from tests.kernels.conftest import make_backend


def test_every_operation_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_backend("cpu")  # skips where there is no compiler
    flags = ["--rows", "1", "3", "--vocab-size", "300", "--rounds", "2", "--threads", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sampler_cost.py", *flags])
    assert main() == 0
    result = json.loads((tmp_path / "sampler_cost.json").read_text())
    measured = [(cost["operation"], cost["num_rows"]) for cost in result["costs"]]
    assert measured == [(name, rows) for rows in (1, 3) for name in (*SETTINGS, *LOGPROBS)]
    assert all(cost["native"] > 0 and cost["torch"] > 0 for cost in result["costs"])
