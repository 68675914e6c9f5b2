"""A peer's settings beside each other, on a scripted server that is as fast as its setting says."""

import sys
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import peer_settings
from tests.benchmarks.test_peers import COMPLETIONS, plan


def test_the_fastest_setting_is_the_fastest(monkeypatch):
    monkeypatch.setattr(peer_settings, "POINTS", (replace(COMPLETIONS, num_rounds=1),))
    plans = [plan("slow", "--delay", "0.02"), plan("fast")]
    ((point),) = peer_settings.measure(plans, 0, Console(quiet=True))
    slow, fast = (point["settings"][name] for name in ("slow", "fast"))
    assert slow["errors"] == fast["errors"] == {}
    assert fast["output_tokens_per_second"] > slow["output_tokens_per_second"]


def test_settings_differ_from_what_is_started_by_what_they_say(tmp_path, monkeypatch):
    model = tmp_path / "model.gguf"
    monkeypatch.setattr(peer_settings, "resolve", lambda _: model)
    words = ["--llama-server", str(tmp_path / "llama-server"), "--vllm", str(tmp_path / "vllm")]
    monkeypatch.setattr(
        sys, "argv", ["peer_settings.py", *words, "--vllm-model", str(tmp_path), "--results", str(tmp_path)]
    )
    asked = []

    def measure(plans, *_):
        asked.append([each.shown_command for each in plans])
        return []

    monkeypatch.setattr(peer_settings, "measure", measure)
    assert peer_settings.main() == 0
    for commands in asked:
        assert len(set(commands)) == len(commands)
    assert any(command.endswith("--kv-unified --flash-attn off") for command in asked[0])
    assert any(command.startswith("OMP_WAIT_POLICY=passive llama-server") for command in asked[0])
    assert [command.rpartition(" ")[2] for command in asked[1]] == ["bfloat16", "float32", "bfloat16"]
    assert (tmp_path / "peer_settings.json").exists()


def test_vllm_needs_its_directory(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["peer_settings.py", "--vllm", "vllm"])
    with pytest.raises(SystemExit):
        peer_settings.main()
