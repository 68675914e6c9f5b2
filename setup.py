"""Builds the native CPU kernels into one shared library; everything else about the package is in pyproject.toml.

The library is optional: without a C++ compiler the install succeeds and the torch path serves.
`python setup.py build_ext --inplace` builds it in the source tree.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE_DIR = Path("kernels/cpu")
ENTRY_SOURCES = (
    "paged_attention.cpp",
    "model_ops.cpp",
    "quantized.cpp",
    "decoder_layers.cpp",
    "sampler.cpp",
    "kernel_sets.cpp",
)
KERNEL_SOURCES = (
    "attention_tile.cpp",
    "linear_tile.cpp",
    "row_kernels.cpp",
    "quantized_tile.cpp",
    "sampler_rows.cpp",
    "logprob_rows.cpp",
)
HEADERS = (
    "native.h",
    "paged_attention.h",
    "attend_plan.h",
    "attention_products.h",
    "attention_packing.h",
    "cache_elements.h",
    "model_ops.h",
    "quantized.h",
    "quantized_tasks.h",
    "decoder_layers.h",
    "sampler.h",
    "token_order.h",
    "threads.h",
    "lanes.h",
    "int8_dot.h",
)
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
# What each instruction set is compiled with, and the kernels that differ from those of the sets before it.
X86_VARIANTS = {
    "avx2": (["-mavx2", "-mfma", "-mf16c"], KERNEL_SOURCES),
    "avx512": (_AVX512, KERNEL_SOURCES),
    "avx512_vnni": ([*_AVX512, "-mavx512vnni"], ("quantized_tile.cpp",)),
    "avx512_bf16": ([*_AVX512, "-mavx512bf16"], ("attention_tile.cpp",)),
}


class BuildNativeLibrary(build_ext):
    """Compiles the kernels once per instruction set and links no OpenMP runtime.

    The OpenMP symbols stay open: at run time torch's own runtime supplies them, so that one thread pool serves both.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """`package/name.so` without Python's tag: the library is not a Python module."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile and link `ext`. A failure is reported and passed over, as the extension is optional."""
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        # Every kernel includes all of lanes.h, and needs some of it; some compilers' own intrinsics warn of the other.
        flags = ["-std=c++17", "-O3", "-Wno-unused-function", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
        variants = ["-DOCTAVO_X86_VARIANTS"] if is_x86 else []
        objects = self._compile(ENTRY_SOURCES, "entry", [*flags, "-fopenmp", *variants])
        for name, (isa_flags, sources) in {"generic": ([], KERNEL_SOURCES), **(X86_VARIANTS if is_x86 else {})}.items():
            objects += self._compile(sources, name, [*flags, f"-DOCTAVO_ISA={name}", *isa_flags])
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(library), target_lang="c++")

    def _compile(self, sources: tuple[str, ...], variant: str, flags: list[str]) -> list[str]:
        output_dir = str(Path(self.build_temp) / variant)
        objects: list[str] = self.compiler.compile(
            [str(SOURCE_DIR / source) for source in sources], output_dir=output_dir, extra_postargs=flags
        )
        return objects


setup(
    ext_modules=[
        Extension(
            "kernels.cpu._paged_attention",
            sources=[str(SOURCE_DIR / source) for source in (*ENTRY_SOURCES, *KERNEL_SOURCES)],
            depends=[str(SOURCE_DIR / header) for header in HEADERS],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNativeLibrary},
)
