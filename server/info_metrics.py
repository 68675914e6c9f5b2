"""The series whose facts stand in their labels: what was built, how it is configured, what the KV cache is like.

They are there before the engine has said what it chose; labels that only it knows are empty until then. Knows no
request.
"""

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

from prometheus_client.core import Metric

from kernels import __version__
from server.config import Settings
from server.engine_client import EngineClient
from server.messages import EngineInfo
from server.metric_families import Families, Snapshot

_PACKAGES = ("torch", "triton", "tokenizers")  # that decide what is computed, and how fast


class InfoSeries:
    """Series that are always 1."""

    def __init__(self, families: Families, engine: EngineClient, settings: Settings) -> None:
        """Facts of this installation, of its settings, and of what `engine` says that it made of them."""
        self._families = families
        self._engine = engine
        self._settings = settings
        self._build = build_facts()

    def snapshot(self) -> Snapshot:
        """Every series, as of now."""
        info = self._engine.info
        return lambda: self._collect(info)

    def _collect(self, info: EngineInfo | None) -> Iterable[Metric]:
        make = self._families
        yield make.info("octavo_build_info", "Versions of the server and what it computes with.", self._build)
        yield make.info("octavo_config_info", "The settings as they are in force.", self._config_facts(info))
        yield make.info("vllm:cache_config_info", "The KV cache, in labels.", self._cache_facts(info))

    def _config_facts(self, info: EngineInfo | None) -> Mapping[str, object]:
        return {
            "model": self._settings.model,
            "quantization": info and info.quantization,
            "kv_cache_dtype": info and info.dtype,
            "device": info and info.device,
            "attention_backend": info and info.attention_backend,
            "max_model_len": info and info.max_model_len,
            "max_num_seqs": info and info.max_num_seqs,
            "max_num_batched_tokens": info and info.max_num_batched_tokens,
            "block_size": self._settings.block_size,
            "num_blocks": info and info.num_blocks,
            "enable_prefix_caching": self._settings.enable_prefix_caching,
            "async_scheduling": info and info.async_scheduling,
        }

    def _cache_facts(self, info: EngineInfo | None) -> Mapping[str, object]:
        return {
            "block_size": self._settings.block_size,
            "num_gpu_blocks": info and info.num_blocks,
            "cache_dtype": info and info.dtype,
            "enable_prefix_caching": self._settings.enable_prefix_caching,
            "gpu_memory_utilization": self._settings.gpu_memory_utilization,
        }


def build_facts() -> dict[str, str]:
    """Versions by name; empty for a package that is not installed."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{package: _version_of(package) for package in _PACKAGES},
    }


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
