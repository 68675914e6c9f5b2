"""`select_backend`: what "auto" takes, what explicit names give, and what a person reads when one cannot be had."""

import ctypes
import logging
from pathlib import Path

import pytest
import torch

from kernels.attention.backend import BackendUnavailableError, select_backend
from kernels.cpu import native_library
from tests.kernels.conftest import make_backend

CPU = torch.device("cpu")


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine where the library was not built."""
    monkeypatch.setattr(native_library, "LIBRARY_PATH", tmp_path / "_paged_attention.so")
    monkeypatch.setattr("kernels.attention.cpu.load_library", native_library.load_library.__wrapped__)


@pytest.fixture
def with_broken_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine for which the library was not built."""
    broken = tmp_path / "_paged_attention.so"
    broken.write_bytes(b"not an object file")
    monkeypatch.setattr(native_library, "LIBRARY_PATH", broken)
    monkeypatch.setattr("kernels.attention.cpu.load_library", native_library.load_library.__wrapped__)


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_explicit_name(name: str) -> None:
    assert select_backend(name, CPU).name == name


def test_auto_on_a_cpu_is_native_and_silent(caplog: pytest.LogCaptureFixture) -> None:
    make_backend("cpu")
    assert select_backend("auto", CPU).name == "cpu"
    assert not caplog.records


@pytest.mark.usefixtures("without_library")
def test_auto_without_the_library_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    assert select_backend("auto", CPU).name == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not built" in record.getMessage()
    assert "Install a C++ compiler" in record.getMessage()


@pytest.mark.usefixtures("with_broken_library")
def test_auto_with_a_broken_library_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert select_backend("auto", CPU).name == "torch"
    (record,) = caplog.records
    assert "does not load" in record.getMessage()


def test_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tree that moved on under an editable install: the library lacks functions."""
    monkeypatch.setattr(native_library, "LIBRARY_PATH", Path(torch._C.__file__))  # a shared object with other functions
    with pytest.raises(native_library.NativeLibraryError, match="of an older version: it lacks octavo_"):
        native_library.load_library.__wrapped__()


def test_library_whose_arguments_are_laid_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All functions are there, and would read their arguments from the wrong places."""
    make_backend("cpu")

    class MoreArgs(native_library.GateArgs):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setitem(native_library._FUNCTIONS, "octavo_gate", MoreArgs)
    with pytest.raises(native_library.NativeLibraryError, match="of another version"):
        native_library.load_library.__wrapped__()


@pytest.mark.usefixtures("without_library")
def test_cpu_by_name_without_the_library() -> None:
    with pytest.raises(BackendUnavailableError, match="not built"):
        select_backend("cpu", CPU)


def test_cpu_on_another_device() -> None:
    with pytest.raises(BackendUnavailableError, match="cannot read a KV cache on meta"):
        select_backend("cpu", torch.device("meta"))


def test_triton_without_a_gpu() -> None:
    with pytest.raises(BackendUnavailableError, match="needs a GPU, not cpu"):
        select_backend("triton", CPU)


def test_triton_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"install octavo\[gpu\]"):
        select_backend("triton", CPU)


def test_unknown_name() -> None:
    with pytest.raises(BackendUnavailableError, match="unknown attention backend 'flash': choose one of auto, triton"):
        select_backend("flash", CPU)
