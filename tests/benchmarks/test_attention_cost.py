"""The benchmark of native attention: its cases are what they say, and it runs."""

import json
import sys

import pytest
import torch

from benchmarks import attention_cost
from benchmarks.attention_cost import TYPES, Heads, Rows, make_layers
from tests.kernels.conftest import make_backend


@pytest.mark.parametrize(("rows", "num_visible"), [(Rows(1, 1, 9), 9), (Rows(2, 3, 3), 12), (Rows(3, 2, 10), 57)])
def test_visible_keys(rows: Rows, num_visible: int) -> None:
    assert rows.num_visible == num_visible


@pytest.mark.parametrize("types", TYPES)
def test_layers_of_their_own(types: str) -> None:
    batch, layers = make_layers(Heads(3, 4, 2, 32), Rows(2, 1, 40), TYPES[types])
    assert batch.query.shape == (2, 4, 32) and batch.query.dtype == TYPES[types][0]
    assert {layer.key.dtype for layer in layers} == {TYPES[types][1]}
    assert len({layer.key.data_ptr() for layer in layers}) == 3
    assert all((layer.key_scale is None) == (types != "int8") for layer in layers)


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    make_backend("cpu")
    monkeypatch.setitem(attention_cost.MODELS, "SmolLM2-135M", Heads(2, 2, 1, 32))
    monkeypatch.setattr(attention_cost, "read_bandwidth", lambda *_: 1e9)
    command = ["attention_cost", "--models", "SmolLM2-135M", "--cases", "decode 1 at 128", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--threads", str(torch.get_num_threads()), "--results", str(tmp_path)])
    assert attention_cost.main() == 0
    result = json.loads((tmp_path / "attention_cost.json").read_text())
    assert [cost["types"] for cost in result["costs"]] == list(TYPES)
    assert all(cost["seconds"] > 0 and cost["flops_per_second"] > 0 for cost in result["costs"])
