"""The control groups that limit this process, such as those of its container. Reads files of the kernel alone."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Folders of every group that has a say, of versions 1 and 2; a folder or its files need not exist.

    In a container the topmost may be the only one that is visible.

    Args:
        controller: such as "cpu" or "memory".
        root: of the file system.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        yield from (mount / group.lstrip("/"), *(mount / parent for parent in Path(group.lstrip("/")).parents), mount)


def text_of(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
