"""Resolves what the image for GPUs installs, and writes the versions to constraints.txt beside this file.

The image for CPUs installs a part of it. `python deploy/image/pin_packages.py` downloads no packages: pip reads their
metadata and reports. Run it to move the image to newer versions, with the Python version of the image's base.
tests/deploy/test_dockerfile.py fails where pyproject.toml asks for others than are pinned.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from requirements import requirements  # beside this file, which Python looks there for

FOLDER = Path(__file__).resolve().parent
PYPROJECT = FOLDER.parent.parent / "pyproject.toml"
HEADER = """\
# The version of every package in the image, for the Python of its base. Written by deploy/image/pin_packages.py.
# torch comes from PyTorch's index in the variant for CPUs, and is PyPI's own build, for CUDA, in the other.
"""


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as name:
        wanted, report = Path(name) / "wanted.txt", Path(name) / "report.json"
        wanted.write_text("\n".join(requirements("cuda", PYPROJECT)))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary", ":all:", "--report", str(report), "--requirement", str(wanted)]
        # Settings of this machine may name folders of wheels with a torch for CPUs: pip's files of settings are left
        # out, and of its variables only such folders, since a mirror or certificates may be needed.
        environment = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
        subprocess.run(command, check=True, env={**environment, "PIP_CONFIG_FILE": os.devnull})  # noqa: S603
        installed = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    pins = sorted(f"{item['name'].lower().replace('_', '-')}=={item['version']}" for item in installed)
    (FOLDER / "constraints.txt").write_text(HEADER + "\n".join(pins) + "\n", encoding="utf-8")
    print(f"{len(pins)} packages are pinned.")


if __name__ == "__main__":
    main()
