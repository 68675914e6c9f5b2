"""Compiles the Triton kernels for real GPUs, in bfloat16 and without one: what the interpreter cannot show.

Gates register spills: a kernel that spills is several times slower, and a compiler release can start it.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels.conftest import IS_INTERPRETING

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(IS_INTERPRETING, reason="the interpreter replaces the compiler")

TENSOR_TYPES = {
    **dict.fromkeys(["query", "key", "value", "key_cache", "value_cache", "out"], "*bf16"),
    **dict.fromkeys(["partial_out", "partial_max", "partial_sum"], "*fp32"),
    **dict.fromkeys(["block_tables", "items", "merges"], "*i32"),
    "slot_mapping": "*i64",
    "score_scale": "fp32",
}
HEADS = {"NUM_Q_HEADS": 32, "GROUP_SIZE": 4, "HEAD_DIM": 128, "PADDED_DIM": 128, "BLOCK_SIZE": 16}
DECODE = {**HEADS, "QUERY_ROWS": 16, "KEYS": 64, "SLIDING_WINDOW": 0, "SOFTCAP": 0.0}
PREFILL = {**DECODE, "QUERY_ROWS": 64}
GEMMA = {**DECODE, "HEAD_DIM": 256, "PADDED_DIM": 256, "KEYS": 32, "SLIDING_WINDOW": 512, "SOFTCAP": 50.0}
MERGE = {"NUM_Q_HEADS": 32, "HEAD_DIM": 128, "PADDED_DIM": 128, "HEADS": 16}
WRITE = {"NUM_KV_HEADS": 3, "HEAD_DIM": 80, "PADDED_HEADS": 4, "PADDED_DIM": 128, "BLOCK_SIZE": 16}
KERNELS = {
    "decode": ("attend_kernel", DECODE, 4),
    "prefill": ("attend_kernel", PREFILL, 4),
    "decode of a capped window": ("attend_kernel", GEMMA, 8),
    "merge": ("merge_kernel", MERGE, 4),
    "write": ("write_kv_kernel", WRITE, 4),
}
MAX_STACK_BYTES = 16  # Triton 3.6 spills four registers of the prefill on compute capability 8.0; 3.9 none


def bytes_of_stack(cubin: bytes, folder: Path) -> int:
    """Stack bytes per thread, where spilled registers go."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this build of Triton ships no cuobjdump")
    usage = subprocess.run(
        [str(tool), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[0])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_almost_without_spills(
    kernel: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.attention import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    name, constants, num_warps = KERNELS[kernel]
    function = getattr(triton_kernels, name)
    types = {
        arg: "constexpr" if arg in constants else TENSOR_TYPES.get(arg, "i32")  # the rest are strides
        for arg in function.arg_names
    }
    # Pointers and strides of real tensors are multiples of 16, which wide loads need to know.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(function.arg_names)
        if types[arg].startswith("*") or arg.endswith("_stride")
    }
    compiled = triton.compile(
        ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": True},
    )
    assert bytes_of_stack(compiled.asm["cubin"], tmp_path) <= MAX_STACK_BYTES
