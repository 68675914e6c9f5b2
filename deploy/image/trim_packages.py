"""Removes from installed packages what no server needs at run time: tests, headers, build files, type stubs.

`python trim_packages.py SITE_PACKAGES` prints how much each rule freed. The rules name packages one by one, and nothing
that an import reaches: the image's own check imports them all afterwards. Standard library only.
"""

import shutil
import sys
from pathlib import Path

# Patterns within site-packages, and why they can go.
RULES = (
    (("torch/test", "torch/bin/*[tT]est*", "torch/bin/upgrader_models"), "torch's own tests"),
    (("torch/bin/protoc*", "torch/bin/*.ptl"), "tools to build torch with"),
    (
        ("torch/lib/lib*_test.so", "torch/lib/libbackend_with_compiler.so", "torch/lib/libaoti_custom_ops.so"),
        "torch's own tests",
    ),
    (("torch/include", "torch/share/cmake", "torch/lib/*.a"), "headers and archives, for extensions in C++"),
    (("numpy/**/tests", "sympy/**/tests", "networkx/**/tests"), "tests"),
    (("numpy/_core/include", "numpy/**/*.a"), "headers and archives, for extensions in C"),
    (("torch/**/*.pyi", "numpy/**/*.pyi"), "stubs, for type checkers"),
)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files under a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def trim(site_packages: Path, pattern: str) -> int:
    """Remove what matches; returns the bytes freed."""
    freed = 0
    for path in sorted(site_packages.glob(pattern)):
        if not path.exists():  # inside a folder that is already gone
            continue
        freed += size_of(path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return freed


def main() -> int:
    """Apply all rules to the folder that the command line names; returns the exit code."""
    if len(sys.argv) != 2 or not (site_packages := Path(sys.argv[1])).is_dir():
        print("usage: trim_packages.py SITE_PACKAGES", file=sys.stderr)
        return 2
    before = size_of(site_packages)
    for patterns, why in RULES:
        for pattern in patterns:
            print(f"{trim(site_packages, pattern) / 1e6:8.1f} MB  {pattern:45} {why}")
    print(f"{(before - size_of(site_packages)) / 1e6:8.1f} MB of {before / 1e6:.1f} MB removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
