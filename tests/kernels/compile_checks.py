"""What must hold of a compiled kernel: no spills, no more registers than recorded, the right instructions.

Owns the rules and the file of recorded registers. Knows nothing of how kernels come to be compiled.
"""

import json
from pathlib import Path

from tests.kernels.compile_for import MAX_SHARED_BYTES
from tests.kernels.kernel_launches import Instance

REGISTER_BUDGET = Path(__file__).with_name("register_budget.json")
# The unit that makes a prefill fast: of a warp group on Hopper, with its own memory on Blackwell.
PREFILL_UNITS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "MFMA"}

Budget = dict[str, dict[str, dict[str, int]]]  # Triton's release -> target -> instance -> registers


def read_budget(path: Path = REGISTER_BUDGET) -> Budget:
    return json.loads(path.read_text()) if path.exists() else {}


def write_budget(budget: Budget, path: Path = REGISTER_BUDGET) -> None:
    path.write_text(json.dumps(budget, indent=1, sort_keys=True) + "\n")


def release(triton_version: str) -> str:
    """3.9.0 is 3.9: patches are not told apart."""
    return ".".join(triton_version.split(".")[:2])


def recorded_registers(budget: Budget, triton_version: str, target: str) -> dict[str, int]:
    """What was recorded with this release of Triton, or, for a newer one, with the newest before it."""
    version = [int(part) for part in release(triton_version).split(".")]
    known = sorted([int(part) for part in name.split(".")] for name in budget)
    nearest = [other for other in known if other <= version] or known[:1]
    return budget[".".join(map(str, nearest[-1]))].get(target, {}) if nearest else {}


def complaints(instance: Instance, target: str, recorded: dict[str, int]) -> list[str]:
    """Everything that is wrong with a kernel, each in a few words."""
    found = []
    taken = instance.resources
    if taken.is_spilling:
        found.append(f"spills: {taken.num_spills} times, {taken.spill_bytes} bytes")
    if instance.name not in recorded:
        found.append("has no recorded budget of registers: make kernels ARGS=--record")
    elif taken.registers > recorded[instance.name]:
        found.append(f"takes {taken.registers} registers, {recorded[instance.name]} are recorded")
    if taken.shared_bytes > MAX_SHARED_BYTES[target]:
        found.append(f"takes {taken.shared_bytes} bytes of shared memory of {MAX_SHARED_BYTES[target]}")
    if instance.kernel == "attend_kernel":
        found += _complaints_of_attention(instance, target)
    return found


def _complaints_of_attention(instance: Instance, target: str) -> list[str]:
    if "float32" in instance.name.split():
        return []  # exact products, which no matrix unit has: a mode for tests and small models
    found = []
    instructions = instance.resources.instructions
    unit = PREFILL_UNITS[target]
    if "prefill" in instance.name and not instructions.get(unit):
        found.append(f"does not use {unit}: {instructions}")
    if target != "gfx942" and "bfloat16" in instance.name:
        narrow = {name: instructions.get(name, 0) for name in ("LDGSTS.64", "LDG.64", "LDGSTS.16", "LDG.16")}
        if any(narrow.values()):
            found.append(f"loads keys or values in pieces of less than 128 bits: {narrow}")
        if instance.num_stages > 1 and not instructions.get("LDGSTS.128"):
            found.append(f"does not copy keys and values asynchronously: {instructions}")
    return found
