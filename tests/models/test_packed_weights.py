"""Packed weights on disk: what is read is what was written, whole, of this model and by this user; or nothing."""

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kernels.model_ops.torch_ops import TorchOps
from kernels.quantized_weight import QuantizedWeight, pack, quantize
from models import packed_weights, quantization
from models.decoder import Decoder
from models.loader import load_model
from models.packed_weights import FORMAT_VERSION, PackedModel, PackedShape, PackedWeights
from tests.models.test_quantization import weights_of
from tests.models.tiny_models import build, save

SHAPES = (PackedShape("first", 40, 64, 8), PackedShape("second", 16, 96, 4), PackedShape("third", 211, 32, 8))


def made_weights() -> list[QuantizedWeight]:
    """The same ones every time and on every processor, of the shapes above."""
    generator = torch.Generator().manual_seed(1)

    def whole(end: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=generator)

    scales, minimums = whole(2000, 2, 16, 3) / 1024 - 1
    first, third = whole(2000, 40, 64) / 1000 - 1, whole(2000, 211, 32) / 1000 - 1
    return [quantize(first), pack(whole(16, 16, 96).to(torch.uint8), scales, minimums), quantize(third)]


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    """A file that stands for a model's."""
    path = tmp_path / "some model.gguf"
    path.write_bytes(bytes(range(256)) * 4000)
    return PackedModel(path, (path,), "int8", SHAPES)


@pytest.fixture
def packed(tmp_path: Path) -> PackedWeights:
    return PackedWeights(tmp_path / "home" / "packed", 2)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def kept_file(tmp_path: Path) -> Path:
    [path] = files_of(tmp_path / "home" / "packed")
    return path


def assert_equal(got: dict[str, QuantizedWeight] | None, want: list[QuantizedWeight]) -> None:
    assert got is not None and list(got) == [shape.name for shape in SHAPES]
    for ours, theirs in zip(got.values(), want, strict=True):
        assert (ours.bits, ours.out_features, ours.in_features) == (
            theirs.bits,
            theirs.out_features,
            theirs.in_features,
        )
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scales, theirs.scales)
        assert ours.minimums is theirs.minimums is None or torch.equal(ours.minimums, theirs.minimums)
        assert ours.codes.data_ptr() % 64 == 0 and ours.scales.data_ptr() % 32 == 0


def test_what_is_read_is_what_was_written(packed: PackedWeights, model: PackedModel, tmp_path: Path) -> None:
    assert packed.read(model) is None
    assert packed.write(model, made_weights())
    assert_equal(packed.read(model), made_weights())
    path = kept_file(tmp_path)
    assert path.name.startswith("some_model-") and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("second.minimums"), made_weights()[1].minimums)


def test_the_layout_is_that_of_the_format_version() -> None:
    """Whoever changes it, or how values are rounded, must count FORMAT_VERSION up, or old files would be read."""
    digest = hashlib.sha256()
    for weight in made_weights():
        for part in (weight.codes, weight.scales, *([weight.minimums] if weight.minimums is not None else [])):
            digest.update(part.numpy().tobytes())
    assert (FORMAT_VERSION, digest.hexdigest()[:16]) == (1, "c2a84f80b7a23955")


def test_damage_anywhere_is_seen(
    packed: PackedWeights, model: PackedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert packed.write(model, made_weights())
    path = kept_file(tmp_path)
    whole = path.read_bytes()
    places = [0, 8, 9, 200, len(whole) // 2, len(whole) - 1, *torch.randint(0, len(whole), (40,)).tolist()]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert packed.read(model) is None, place
    for size in (0, 5, 8, 300, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert packed.read(model) is None, size
    path.write_bytes(whole + b"x")
    assert packed.read(model) is None
    assert f"{path} is damaged; the weights are packed again" in caplog.text
    assert packed.write(model, made_weights())
    assert_equal(packed.read(model), made_weights())


def test_another_state_of_the_model_is_another_file(packed: PackedWeights, model: PackedModel, tmp_path: Path) -> None:
    assert packed.write(model, made_weights())
    old = kept_file(tmp_path)
    content = bytearray(model.path.read_bytes())
    content[-1] ^= 1
    state = model.path.stat()
    model.path.write_bytes(content)
    os.utime(model.path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as some copies leave it
    assert packed.read(model) is None
    assert packed.write(model, made_weights())
    assert kept_file(tmp_path) != old  # and the old one is gone
    os.utime(model.path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert packed.read(model) is None
    for other in (
        PackedModel(model.path, model.files, "gguf", SHAPES),
        PackedModel(model.path, model.files, "int8", SHAPES[:2]),
    ):
        assert packed.read(other) is None


def test_a_model_that_is_replaced_meanwhile_is_not_kept(
    packed: PackedWeights, model: PackedModel, tmp_path: Path
) -> None:
    def weights():
        yield from made_weights()
        model.path.write_bytes(b"another one")

    assert not packed.write(model, weights())
    assert files_of(tmp_path / "home" / "packed") == []


def test_what_others_can_write_is_not_trusted(
    packed: PackedWeights, model: PackedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert packed.write(model, made_weights())
    path = kept_file(tmp_path)
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        assert packed.read(model) is None
    assert "other users may write to it" in caplog.text
    path.chmod(0o600)
    assert_equal(packed.read(model), made_weights())
    target = path.rename(tmp_path / "elsewhere")
    path.symlink_to(target)
    assert packed.read(model) is None
    path.unlink()
    path.parent.chmod(0o777)
    assert not packed.write(model, made_weights())
    assert "every start packs them again" in caplog.text and files_of(path.parent) == []


def test_what_belongs_to_another_user_is_not_trusted(
    packed: PackedWeights, model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packed.write(model, made_weights())
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert packed.read(model) is None
    assert not packed.write(model, made_weights())


def test_a_read_only_file_system_is_read(
    packed: PackedWeights, model: PackedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert packed.write(model, made_weights())

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert_equal(packed.read(model), made_weights())
    assert caplog.text == ""


def test_a_pipe_in_the_place_of_a_file_holds_up_nothing(
    packed: PackedWeights, model: PackedModel, tmp_path: Path
) -> None:
    assert packed.write(model, made_weights())
    path = kept_file(tmp_path)
    path.unlink()
    os.mkfifo(path, mode=0o600)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(packed.read, model)
        done, _ = wait([reading], timeout=10)
        if not done:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # what it waits for
    assert done and reading.result() is None


def test_a_full_disk_costs_the_file_and_nothing_else(
    packed: PackedWeights,
    model: PackedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write, calls = os.pwrite, []

    def fill_up(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:1000], offset)  # in parts, as a kernel may

    monkeypatch.setattr(os, "pwrite", fill_up)
    assert not packed.write(model, made_weights())
    assert "No space left on device" in caplog.text and "every start packs them again" in caplog.text
    assert files_of(tmp_path / "home" / "packed") == []
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:1000], offset))
    assert packed.write(model, made_weights())
    assert_equal(packed.read(model), made_weights())


def test_a_folder_that_cannot_be_made(model: PackedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    packed = PackedWeights(tmp_path / "file" / "packed", 1)
    assert packed.read(model) is None
    assert not packed.write(model, made_weights())


def test_a_model_whose_file_is_gone_fails_no_start(
    packed: PackedWeights, model: PackedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model.path.unlink()  # its weights are still mapped
    assert packed.read(model) is None
    assert not packed.write(model, made_weights())
    assert "No such file or directory" in caplog.text and files_of(tmp_path / "home" / "packed") == []


def test_an_error_in_the_making_leaves_nothing(packed: PackedWeights, model: PackedModel, tmp_path: Path) -> None:
    def weights():
        yield made_weights()[0]
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        packed.write(model, weights())
    assert not packed.write(model, [made_weights()[0], None, made_weights()[2]])
    assert files_of(tmp_path / "home" / "packed") == []


def test_servers_that_start_at_once(packed: PackedWeights, model: PackedModel, tmp_path: Path) -> None:
    def start(_: int) -> dict[str, QuantizedWeight] | None:
        return packed.read(model) or (packed.write(model, made_weights()) and packed.read(model))

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(start, range(24)):
            assert_equal(found, made_weights())
    kept_file(tmp_path)


def test_the_folder_is_bounded(
    packed: PackedWeights, model: PackedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "_MAX_FILES", 2)
    folder = tmp_path / "home" / "packed"
    models = []
    for number in range(3):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(b"weights")
        models.append(PackedModel(path, (path,), "int8", SHAPES))
    for number in (0, 1):
        assert packed.write(models[number], made_weights())
        [path] = folder.glob(f"{number}-*")
        os.utime(path, (time.time() - 1000 + number,) * 2)
    assert packed.read(models[0]) is not None  # used again: the other one is now the oldest
    abandoned, unfinished = folder / ".a.tmp", folder / ".b.tmp"
    for path in (abandoned, unfinished):
        path.touch()
    os.utime(abandoned, (0, 0))
    assert packed.write(models[2], made_weights())
    assert [path.name[0] for path in files_of(folder)] == [".", "0", "2"]
    assert unfinished.exists()
    os.utime(unfinished, (0, 0))  # the rest of a start that was ended while it wrote
    assert packed.read(models[2]) is not None
    assert not unfinished.exists()


def load(
    path: Path, packed: PackedWeights | None, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Decoder:
    return load_model(path, torch.float32, torch.device("cpu"), TorchOps(), on_progress, "int8", packed)


def test_progress_is_told_while_weights_are_packed(
    packed: PackedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(build("llama"), tmp_path / "model")
    monkeypatch.setattr("models.loader.MIN_BYTES", 0)
    told: list[tuple[int, int]] = []
    num_told = []
    quantize_weight = quantization.quantize_weight

    def quantize_later(*arguments: Any) -> QuantizedWeight | None:
        num_told.append(len({done for done, _ in told}))
        return quantize_weight(*arguments)

    monkeypatch.setattr("models.loader.quantize_weight", quantize_later)
    for keeps in (True, False):
        monkeypatch.setattr(PackedWeights, "write", PackedWeights.write if keeps else lambda *_: False)
        told.clear()
        num_told.clear()
        load(path, packed, lambda done, total: told.append((done, total)))
        assert num_told == list(range(1, len(num_told) + 1))
        assert told == sorted(told) and told[0][0] == 0 and told[-1][0] == told[-1][1]
        for file in files_of(tmp_path / "home" / "packed"):
            file.unlink()


def test_a_second_start_rounds_nothing(packed: PackedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(build("llama"), tmp_path / "model")
    load(path, packed)
    assert files_of(tmp_path / "home" / "packed") == []  # not worth a file
    monkeypatch.setattr("models.loader.MIN_BYTES", 0)
    plain = weights_of(load(path, None))
    first = weights_of(load(path, packed))
    monkeypatch.setattr("models.loader.quantize_weight", None)
    second = weights_of(load(path, packed))
    for name, weight in plain.items():
        for other in (first[name], second[name]):
            assert torch.equal(other.codes, weight.codes) and torch.equal(other.scales, weight.scales)
