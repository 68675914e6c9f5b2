"""The real models that tests run on, from the model store's cache; fetched once where they are absent."""

import os
from functools import cache
from pathlib import Path

from server.model_store import resolve


def _home() -> Path | None:
    return Path(os.environ["OCTAVO_HOME"]) if os.environ.get("OCTAVO_HOME") else None


@cache
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: byte-level BPE, a chat template."""
    return resolve("smollm2", _home())


@cache
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M: SentencePiece with byte fallback, no chat template."""
    return resolve("gemma3-270m", _home())
