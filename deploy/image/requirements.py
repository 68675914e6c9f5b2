"""Prints what the image installs: the dependencies of pyproject.toml, with the extras of a variant, one a line.

`python requirements.py cpu|cuda [pyproject.toml]`. So that the image's layer of dependencies depends on that one file,
and not on the code. Standard library only: it runs before anything is installed.
"""

import sys
import tomllib
from pathlib import Path

# Spans are sent where --otlp-traces-endpoint says, which an operator sets and an image must therefore be able to do.
EXTRAS = {"cpu": ("tracing",), "cuda": ("tracing", "gpu")}


def requirements(variant: str, pyproject: Path) -> list[str]:
    """The requirements of one variant. Raises SystemExit for one that there is not."""
    if variant not in EXTRAS:
        raise SystemExit(f"There is no variant {variant!r} of the image: use --build-arg VARIANT=cpu or VARIANT=cuda.")
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = (requirement for extra in EXTRAS[variant] for requirement in project["optional-dependencies"][extra])
    return [*project["dependencies"], *extras]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: requirements.py cpu|cuda [pyproject.toml]")
    print(*requirements(sys.argv[1], Path(sys.argv[2] if len(sys.argv) == 3 else "pyproject.toml")), sep="\n")
