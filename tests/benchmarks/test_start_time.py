"""The measurement of starts, on starts that are made up."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import start_time
from benchmarks.server_process import ServerDidNotStart
from benchmarks.start_time import Start, main


def test_medians_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    homes: list[Path] = []

    def start(flags: Sequence[str], home: Path) -> Start:
        assert flags[:2] == ("--model", str(model)) and home.is_dir()
        homes.append(home)
        kind = 100.0 if flags[2:] else 10.0 * homes.count(home)
        return Start(kind + len(homes), 1.0, 2.0)

    monkeypatch.setattr(start_time, "measured_start", start)
    output = tmp_path / "result.json"
    assert main(["--model", str(model), "--rounds", "3", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    medians = {kind: values["ready_seconds"] for kind, values in result["medians"].items()}
    assert medians == {"nothing kept": 14.0, "packed weights kept": 25.0, "--quantization none": 106.0}
    assert len(set(homes)) == 3 and not any(home.exists() for home in homes)
    assert result["model"] == "m.gguf" and result["machine"]["torch"]


def test_a_server_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> Start:
        raise ServerDidNotStart("octavo did not get ready:\nout of luck")

    monkeypatch.setattr(start_time, "measured_start", start)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    output = tmp_path / "result.json"
    assert main(["--model", str(tmp_path / "m.gguf"), "--output", str(output)]) == 1
    assert "out of luck" in capsys.readouterr().err and not output.exists()
