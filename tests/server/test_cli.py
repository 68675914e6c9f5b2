"""The command line: what it prints, its exit codes, and that it stays light."""

import os
import subprocess
import sys

import pytest

from kernels import __version__
from server import cli
from server.config import Settings, flag_of, variable_of


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch) -> list[Settings]:
    seen: list[Settings] = []

    def serve(settings: Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("server.serve.serve", serve)
    return seen


def test_flags_reach_the_settings(served):
    arguments = "serve --port 9 --max-num-seqs=7 --api-key a --api-key b --kv-cache-memory 1GiB --dtype float32"
    assert cli.main(arguments.split()) == 0
    (settings,) = served
    assert (settings.port, settings.max_num_seqs, settings.api_key) == (9, 7, ("a", "b"))
    assert (settings.kv_cache_memory, settings.dtype) == (1 << 30, "float32")


def test_switches_take_no_value(served):
    assert cli.main(["serve", "--batch-invariant", "--no-enforce-eager"]) == 0
    assert (served[0].batch_invariant, served[0].enforce_eager, served[0].async_scheduling) == (True, False, None)


@pytest.mark.parametrize(("flag", "value"), [("--async-scheduling", True), ("--no-async-scheduling", False)])
def test_switch_that_is_else_left_to_the_device(served, flag, value):
    assert cli.main(["serve", flag]) == 0
    assert served[0].async_scheduling is value


def test_model_may_stand_without_its_flag(served):
    assert cli.main(["serve", "some/model"]) == 0
    assert served[0].model == "some/model"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("serve --prot 3", "There is no flag --prot; did you mean --port?"),
        ("serve --max-num-seq 3", "There is no flag --max-num-seq; did you mean --max-num-seqs?"),
        ("serve --zzz", "There is no flag --zzz."),
        ("serve --port", "Argument --port: expected one argument."),
        ("serve --port x", "--port must be a valid integer, not 'x'."),
        ("serve --api-key=", "--api-key must not be empty."),
        ("serve --api-key a --api-key=", "--api-key must not be empty."),
        ("serve --model=", "--model must not be empty."),
        ("serve a b", "There is one argument too many: b."),
        ("serve a --model b", "Give the model once, either as MODEL or as --model."),
        ("serve --config /nowhere/octavo.toml", "cannot be read: No such file or directory."),
        ("start", "Argument COMMAND: invalid choice: 'start' (choose from 'serve', 'pull', 'load-test')."),
        ("pull", "The following arguments are required: MODEL."),
        ("pull x --hom y", "There is no flag --hom; did you mean --home?"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(served, capsys, arguments, sentence):
    assert cli.main(arguments.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("octavo: ")
    assert output.err.endswith(f"{sentence}\n")
    assert output.err.count("\n") == 1
    assert served == []


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 2
    assert "serve" in capsys.readouterr().err


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field, info in Settings.model_fields.items():
        assert info.description
        assert info.description in text, field
        assert f"{flag_of(field)} " in text
        assert f"[env: {variable_of(field)}]" in text
    assert "(default: 8000)" in text
    assert "None" not in text
    assert "tuple" not in text


def test_pull_prints_the_path(monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr("server.model_store.pull", lambda *arguments: calls.append(arguments) or tmp_path / "m.gguf")
    assert cli.main(["pull", "smollm2", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm.gguf'}\n"
    assert calls[0][:2] == ("smollm2", tmp_path)


def test_pull_that_fails(capsys, tmp_path):
    assert cli.main(["pull", "smollm3", "--home", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("octavo: There is no model named smollm3")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_process_exit_codes():
    version = run("-m", "server.cli", "--version")
    assert (version.returncode, version.stdout) == (0, f"octavo {__version__}\n")
    wrong = run("-m", "server.cli", "serve", OCTAVO_PROT="1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "octavo: There is no setting for the variable OCTAVO_PROT; did you mean OCTAVO_PORT?\n"
    missing = run("-m", "server.cli", "serve", "/nowhere/model.gguf")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert missing.stderr.startswith("octavo: There is no model at /nowhere/model.gguf")


def test_the_edge_does_not_load_torch():
    heavy = {"torch", "transformers", "triton"}
    code = f"import sys, server.cli, server.serve; sys.exit(' '.join({heavy} & set(sys.modules)))"
    assert run("-c", code).stderr.strip() == ""
