"""Compiles kernels for a GPU that is not there, and reads what the compiler made of them.

A stand-in driver names the target, and each launch compiles instead of running, so the real launch code decides the
types, the alignment and the constants. Knows no kernel: launches are given. Never with the interpreter on.
"""

import contextlib
import dataclasses
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What one program may have of it; the launch of a kernel that asks for more fails.
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Instructions worth counting: matrix units (HGMMA and UTCHMMA are Hopper's and Blackwell's own), asynchronous copies
# to shared memory, plain loads, and spills to and from local memory.
MATRIX_UNITS = ("HGMMA", "UTCHMMA", "HMMA")
LOADS = ("LDGSTS", "LDG")
SPILLS = ("LDL", "STL")
SASS_INSTRUCTION = re.compile(rf"\b({'|'.join((*MATRIX_UNITS, *LOADS, *SPILLS))})((?:\.\w+)*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes of a GPU."""

    registers: int  # per thread; of gfx942 the vector registers
    shared_bytes: int  # per program
    spill_bytes: int  # per thread: stack, or scratch memory; spilled registers live there
    num_spills: int  # spill instructions (CUDA) or spilled registers (HIP)
    instructions: dict[str, int]  # mnemonic, of loads with the number of bits -> count

    @property
    def is_spilling(self) -> bool:
        """Whether registers go to memory: a kernel that spills is several times slower."""
        return self.spill_bytes > 0 or self.num_spills > 0


class AbsentGpu:
    """As much of a Triton driver as compiling takes."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        """A device of its own for each target: Triton keeps compiled kernels by device."""
        return f"{self._target.backend}:{self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compiling_for(target_name: str) -> Iterator[list[CompiledKernel]]:
    """Inside, each launch of a Triton kernel compiles it for the target and runs nothing.

    Yields:
        The distinct kernels compiled so far, in the order of their first launch.
    """
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter replaces the compiler"
    compiled: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, warmup: bool = True, **kwargs: Any) -> CompiledKernel:
        kernel = run(self, *args, warmup=True, **kwargs)
        if all(kernel is not other for other in compiled):
            compiled.append(kernel)
        return kernel

    triton.runtime.driver.set_active(AbsentGpu(TARGETS[target_name]))
    with (
        tempfile.TemporaryDirectory() as cache,
        triton.knobs.cache.scope(),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        triton.knobs.cache.dir = cache
        yield compiled


def constants(kernel: CompiledKernel) -> dict[str, Any]:
    """The constants that a kernel was compiled with, by the names of its arguments."""
    return {kernel.src.fn.arg_names[index]: value for (index,), value in kernel.src.constants.items()}


def resources(kernel: CompiledKernel) -> Resources:
    """Registers, memory, spills and instructions of a compiled kernel."""
    return _hip_resources(kernel) if "amdgcn" in kernel.asm else _cuda_resources(kernel)


def _cuda_resources(kernel: CompiledKernel) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run_cuobjdump("--dump-resource-usage", file.name)
        sass = _run_cuobjdump("--dump-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    counts = Counter(_mnemonic(*match.groups()) for match in SASS_INSTRUCTION.finditer(sass))
    return Resources(
        registers=registers,
        shared_bytes=kernel.metadata.shared,
        spill_bytes=stack + local,
        num_spills=sum(counts.pop(name, 0) for name in SPILLS),
        instructions=dict(counts),
    )


def _mnemonic(name: str, suffixes: str) -> str:
    """The name, and of a load its width: LDGSTS.E.BYPASS.128 is LDGSTS.128, LDG.E is LDG.32."""
    if name not in LOADS:
        return name
    widths = [suffix for suffix in suffixes.split(".") if suffix in ("U8", "S8", "U16", "S16", "64", "128")]
    return f"{name}.{widths[0].lstrip('US') if widths else 32}"


def _run_cuobjdump(option: str, path: str) -> str:
    # cuobjdump calls nvdisasm, which lies beside it.
    environment = {**os.environ, "PATH": f"{NVIDIA_TOOLS}:{os.environ.get('PATH', '')}"}
    command = [str(NVIDIA_TOOLS / "cuobjdump"), option, path]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _hip_resources(kernel: CompiledKernel) -> Resources:
    assembly = kernel.asm["amdgcn"]
    numbers = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    return Resources(
        registers=numbers["vgpr_count"],
        shared_bytes=kernel.metadata.shared,
        spill_bytes=numbers["private_segment_fixed_size"],
        num_spills=numbers["vgpr_spill_count"],  # scalar registers spill to lanes of vector registers, not to memory
        instructions={"MFMA": assembly.count("v_mfma"), "LOAD.128": assembly.count("load_dwordx4")},
    )
