"""Reads a Dockerfile and a .dockerignore, as far as ours use their languages. Knows nothing of ours."""

import fnmatch
import json
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One of a Dockerfile, with its continued lines joined."""

    name: str
    value: str

    def words(self) -> list[str]:
        """Of the exec form where it is one, else as a shell splits it."""
        return json.loads(self.value) if self.value.startswith("[") else shlex.split(self.value)

    def pairs(self) -> dict[str, str]:
        """Of ENV and LABEL."""
        return dict(word.split("=", 1) for word in self.words())


def instructions(text: str) -> list[Instruction]:
    """All of a Dockerfile, in order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.strip().split(None, 1)) for line in joined.splitlines()]


def last_stage(parsed: list[Instruction]) -> list[Instruction]:
    """What the image is made of."""
    start = max(index for index, each in enumerate(parsed) if each.name == "FROM")
    return parsed[start:]


def is_in_context(path: str, ignore_text: str) -> bool:
    """Whether a file of that path, relative to the root, is sent to the builder: the last pattern that matches wins."""
    included = True
    for line in ignore_text.splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        negated = pattern.startswith("!")
        if _matches(path, pattern.removeprefix("!").strip("/")):
            included = negated
    return included


def _matches(path: str, pattern: str) -> bool:
    """A pattern names a file, or a folder and with it all below."""
    parents = [str(parent) for parent in Path(path).parents if str(parent) != "."]
    return any(_parts_match(candidate.split("/"), pattern.split("/")) for candidate in (path, *parents))


def _parts_match(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_parts_match(parts[skipped:], patterns[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _parts_match(parts[1:], patterns[1:])
