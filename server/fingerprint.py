"""Names the combination of program, model and arithmetic that answers: `system_fingerprint` in OpenAI's API.

The same request with the same seed may be answered differently only where this differs. Knows no request.
"""

import hashlib

from kernels import __version__
from server.config import Settings
from server.messages import EngineInfo

_NUM_DIGITS = 10  # OpenAI's


def system_fingerprint(settings: Settings, info: EngineInfo) -> str:
    """The same after a restart, and on every machine that is set up alike."""
    arithmetic = (info.quantization, info.dtype, settings.kv_cache_dtype, info.attention_backend, info.device)
    parts = (__version__, settings.model, settings.dtype, *arithmetic)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_NUM_DIGITS]
