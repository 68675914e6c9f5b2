"""deploy/verify.sh: what it says of steps that fail, that pass and that lack tools; and that all its files exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "deploy" / "verify.sh"
TOOLS = ("bash", "dirname", "env", "find", "grep", "awk", "paste", "realpath", "sed", "tee", "timeout", "mkdir")


def verify(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if path is None else {**os.environ, "PATH": path}
    command = [str(SCRIPT), "--python", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with what the script itself needs, and no tool of a step."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = next(Path(name) / tool for name in os.environ["PATH"].split(":") if (Path(name) / tool).exists())
        (folder / tool).symlink_to(found)
    return folder


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_step_whose_tools_are_missing_is_skipped_and_says_which(bare_path, tmp_path):
    done = verify("--logs", str(tmp_path / "logs"), "lint", "rules", path=str(bare_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^lint +skipped .*shellcheck is not installed.*; yamllint is not installed", done.stdout)
    assert re.search(r"(?m)^rules +skipped .*promtool is not installed", done.stdout)
    assert (tmp_path / "logs" / "table.txt").read_text().strip() in done.stdout


def test_a_step_that_fails_fails_all_and_names_its_log(bare_path, tmp_path):
    tool(bare_path, "shellcheck", "echo unclean; exit 3")
    tool(bare_path, "yamllint", "exit 0")
    done = verify("--logs", str(tmp_path / "logs"), "lint", path=str(bare_path))
    assert done.returncode == 1, done.stderr
    log = tmp_path / "logs" / "lint.log"
    assert re.search(rf"(?m)^lint +FAILED .*exit status 3; see {re.escape(str(log))}$", done.stdout)
    assert log.read_text() == "unclean\n"
    assert "1 failed." in done.stdout


def test_a_step_that_passes_says_what_it_shows(bare_path, tmp_path):
    tool(bare_path, "shellcheck", "exit 0")
    tool(bare_path, "yamllint", 'echo "$@"')
    done = verify("--logs", str(tmp_path / "logs"), "lint", path=str(bare_path))
    assert done.returncode == 0, done.stdout
    assert re.search(r"(?m)^lint +ok +\d+ s  scripts and YAML are clean$", done.stdout)
    assert "deploy/prometheus/rules.yml" in (tmp_path / "logs" / "lint.log").read_text()


def test_what_a_step_that_passed_has_not_tried_is_told_once(bare_path, tmp_path):
    tool(bare_path, "shellcheck", "echo 'SKIPPED [2] tests/a_test.py:3: no such tool'; echo 'Left out: an image'")
    tool(bare_path, "yamllint", "echo 'SKIPPED [1] tests/b_test.py:9: no such tool'")
    done = verify("--logs", str(tmp_path / "logs"), "lint", path=str(bare_path))
    assert done.returncode == 0, done.stdout
    assert re.search(r"(?m)^lint +ok .*scripts and YAML are clean; not tried: no such tool; an image$", done.stdout)


def test_containers_are_skipped_without_an_engine_or_the_image(bare_path, tmp_path):
    tool(bare_path, "docker-compose", "exit 0")
    tool(bare_path, "docker", 'echo "podman version 4.3.1"')  # Podman's stand-in for it, which is none
    arguments = ("--logs", str(tmp_path / "logs"), "image", "compose-run", "pod")
    done = verify(*arguments, path=str(bare_path))
    assert done.returncode == 0, done.stdout
    assert re.search(r"(?m)^image +skipped .*neither podman nor a Docker that runs", done.stdout)
    assert re.search(r"(?m)^compose-run +skipped .*neither podman nor a Docker that runs", done.stdout)
    assert re.search(r"(?m)^pod +skipped .*kubectl is not installed.*podman is not installed", done.stdout)
    tool(bare_path, "podman", '[ "$1" = info ] && echo netavark')
    done = verify(*arguments, path=str(bare_path))
    assert re.search(r"(?m)^compose-run +skipped +0 s  there is no localhost/octavo:check-model", done.stdout)
    assert re.search(r"(?m)^pod +skipped .*podman has no localhost/octavo:check-model", done.stdout)


@pytest.mark.parametrize("argument", ["--bogus", "no-such-step", "--show"])
def test_an_argument_that_is_none_is_refused(argument):
    done = verify(argument)
    assert done.returncode == 2
    assert done.stderr.startswith("verify.sh: ")


def test_all_steps_are_listed():
    text = SCRIPT.read_text()
    names = re.findall(r'(?m)^    "([a-z-]+)\|\d+\|', text)
    assert len(names) >= 15
    listed = verify("--list").stdout
    for name in names:
        assert re.search(rf"(?m)^{name} ", listed)
        assert re.search(rf"(?m)^        {name}\)", text.partition("run_step()")[2]), f"{name} does nothing"


def test_what_the_steps_run_exists():
    steps = SCRIPT.read_text().partition("run_compose()")[2].partition("check_name()")[0]
    paths = re.findall(r"\b(?:tests|deploy|benchmarks)/[\w/.-]+\w", steps)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_make_calls_it():
    assert "deploy/verify.sh --python $(BIN)/python $(ARGS)" in (ROOT / "Makefile").read_text()
