"""What --quantization and --kv-cache-dtype come to on a device; other settings are tested with the engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from server.config import load_settings
from server.engine_config import EngineConfig
from server.engine_sizing import UnservableSettings, kv_cache_spec, select_quantization

MODEL = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(layers=(0,) * 3, num_kv_heads=2, head_dim=16))


def config(path: str = "/models/m.gguf", **flags: str) -> EngineConfig:
    return load_settings(flags).engine_config(Path(path))


@pytest.mark.parametrize(
    ("path", "flags", "backend", "expected"),
    [
        ("/m.gguf", {}, "cpu", "gguf"),
        ("/m.GGUF", {}, "cpu", "gguf"),
        ("/m", {}, "cpu", "int8"),
        ("/m.gguf", {}, "torch", "none"),  # where there is no compiler
        ("/m.gguf", {}, "triton", "none"),
        ("/m.gguf", {"dtype": "float32"}, "cpu", "none"),
        ("/m", {"dtype": "bfloat16"}, "cpu", "none"),
        ("/m.gguf", {"quantization": "none"}, "cpu", "none"),
        ("/m.gguf", {"quantization": "int8"}, "cpu", "int8"),
        ("/m.gguf", {"quantization": "gguf", "dtype": "float32"}, "cpu", "gguf"),
    ],
)
def test_what_weights_become(path: str, flags: dict[str, str], backend: str, expected: str) -> None:
    assert select_quantization(config(path, **flags), backend) == expected


@pytest.mark.parametrize(
    ("path", "flags", "backend", "message"),
    [
        ("/m", {"quantization": "gguf"}, "cpu", r"keeps the blocks of a \.gguf file, and /m is none: use int8"),
        ("/m", {"quantization": "int8"}, "torch", "needs the native CPU kernels, and attention runs on torch here"),
        ("/m.gguf", {"quantization": "gguf"}, "triton", "runs on triton here: use --quantization none"),
        ("/m", {"quantization": "int8", "dtype": "bfloat16"}, "cpu", "computes in float32: leave out --dtype bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(path: str, flags: dict[str, str], backend: str, message: str) -> None:
    with pytest.raises(UnservableSettings, match=message):
        select_quantization(config(path, **flags), backend)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "quantization", "expected"),
    [
        ("auto", "none", "float32"),
        ("auto", "gguf", "bfloat16"),
        ("auto", "int8", "bfloat16"),
        ("float32", "int8", "float32"),
        ("bfloat16", "none", "bfloat16"),
        ("int8", "gguf", "int8"),
        ("fp8", "none", "float8_e4m3fn"),
    ],
)
def test_the_type_of_the_cache(kv_cache_dtype: str, quantization: str, expected: str) -> None:
    spec = kv_cache_spec(MODEL, config(kv_cache_dtype=kv_cache_dtype), quantization)
    assert spec.dtype == expected


def test_an_engine_is_told_the_cache_folder_as_text() -> None:
    assert config(home="/somewhere").home == "/somewhere"
