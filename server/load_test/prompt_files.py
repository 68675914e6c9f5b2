"""Sessions of a file of prompts: lines of text, or JSON in the forms that data sets of prompts have.

A row's own `max_tokens` (or `output_tokens`) and `at` (seconds from the start) count where it has them.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from math import isfinite
from pathlib import Path
from typing import Any

from server.load_test.lengths import Lengths
from server.load_test.plan import PlannedRequest, PlannedSession, Prompt

_TEXT_FIELDS = ("prompt", "text", "question", "instruction")
_FORMS = "prompt, messages, turns, conversations, conversation with user, text, question or instruction"


class BadPromptFile(ValueError):
    """The file holds no prompts of a known form; the message is for the person who named it."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row: what is said turn by turn; more than one turn is a conversation."""

    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None  # None: as long as the command says
    at: float | None = None  # None: the row does not say when


def read_prompts(path: Path, *, is_chat: bool) -> tuple[PromptRow, ...]:
    """Read a `.jsonl` or `.json` file of rows, or any other file as one prompt a line.

    Raises:
        BadPromptFile: naming the file and the row.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPromptFile(f"The prompts {path} cannot be read: {error}.") from None
    # Not splitlines(): texts may hold U+2028 and other characters that it takes for line ends.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix not in (".json", ".jsonl"):
        rows = [PromptRow((line.rstrip("\r"),)) for _, line in lines]
    else:
        found = _json_rows(path, text, lines)
        rows = [_read_row(path, place, row) for place, row in _grouped(found)]
    if not rows:
        raise BadPromptFile(f"The file {path} has no prompts.")
    for number, row in enumerate(rows, start=1):
        _check_form(path, number, row, is_chat=is_chat)
    return tuple(rows)


def file_sessions(
    rows: Sequence[PromptRow], output_tokens: Lengths, think_time: float, seed: str
) -> Iterator[PlannedSession]:
    """Sessions of the rows in their order, again and again, with the starts that rows have."""
    chance = random.Random(f"{seed} lengths")  # noqa: S311  # no secrets here
    for number in count():
        row = rows[number % len(rows)]
        requests = tuple(
            PlannedRequest(partial(_same, prompt), row.max_tokens or output_tokens.draw(chance), think_time)
            for prompt in row.prompts
        )
        yield PlannedSession(row.at or 0.0, requests, is_conversation=len(requests) > 1)


def _same(prompt: Prompt) -> Prompt:
    return prompt


def _json_rows(path: Path, text: str, lines: Sequence[tuple[int, str]]) -> list[tuple[int, Any]]:
    """Rows with their numbers: lines of a .jsonl, items of a .json's list."""
    if path.suffix == ".json":
        try:
            items = json.loads(text)
        except ValueError as error:
            raise BadPromptFile(f"{path} is not JSON: {error}.") from None
        if not isinstance(items, list):
            raise BadPromptFile(f"{path} is no list of prompts.")
        return list(enumerate(items, start=1))
    rows = []
    for number, line in lines:
        try:
            rows.append((number, json.loads(line)))
        except ValueError as error:
            raise BadPromptFile(f"Line {number} of {path} is not JSON: {error}.") from None
    return rows


def _grouped(rows: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Rows that are turns of one conversation, one after another, become one row."""
    for conversation, group in groupby(rows, key=lambda row: _conversation_of(row[1])):
        if conversation is None:
            yield from group
        else:
            first, *rest = group
            yield first[0], {"turns": [row.get("user") for _, row in (first, *rest)]}


def _conversation_of(row: Any) -> str | None:  # noqa: ANN401
    has_both = isinstance(row, dict) and "conversation" in row and "user" in row
    return json.dumps(row["conversation"]) if has_both else None


def _read_row(path: Path, number: int, row: Any) -> PromptRow:  # noqa: ANN401
    if isinstance(row, str):
        return PromptRow((row,))
    where = f"Row {number} of {path}"
    if not isinstance(row, dict):
        raise BadPromptFile(f"{where} is neither a text nor an object.")
    max_tokens = row.get("max_tokens", row.get("output_tokens"))
    if max_tokens is not None and not (_is_number(max_tokens) and max_tokens == int(max_tokens) >= 1):
        raise BadPromptFile(f"{where}: max_tokens must be a whole number of at least 1, not {max_tokens!r}.")
    at = row.get("at")
    if at is not None and not (_is_number(at) and 0 <= at < 1e9):
        raise BadPromptFile(f"{where}: at must be seconds from the start, not {at!r}.")
    prompts = _prompts_of(row)
    if not prompts or not all(_is_prompt(prompt) for prompt in prompts):
        raise BadPromptFile(f"{where} has no prompt: it needs one of {_FORMS}.")
    return PromptRow(tuple(prompts), None if max_tokens is None else int(max_tokens), at)


def _prompts_of(row: dict[str, Any]) -> Sequence[Any]:
    if "messages" in row:
        return [row["messages"]]
    if isinstance(row.get("turns"), list):
        return list(row["turns"])
    if isinstance(row.get("conversations"), list):  # ShareGPT's form
        said = [turn for turn in row["conversations"] if isinstance(turn, dict)]
        return [turn.get("value") for turn in said if turn.get("from") in ("human", "user")]
    text = next((row[name] for name in _TEXT_FIELDS if name in row), None)
    if "instruction" in row and isinstance(row.get("input"), str) and isinstance(text, str) and row["input"]:
        text = f"{text}\n\n{row['input']}"
    return [] if text is None else [text]


def _is_prompt(prompt: Any) -> bool:  # noqa: ANN401
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    are_ids = all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in prompt)
    return are_ids or all(isinstance(item, dict) and "role" in item and "content" in item for item in prompt)


def _check_form(path: Path, number: int, row: PromptRow, *, is_chat: bool) -> None:
    for prompt in row.prompts:
        if isinstance(prompt, str):
            continue
        if len(row.prompts) > 1:
            raise BadPromptFile(f"Prompt {number} of {path}: turns must be texts.")
        if isinstance(prompt[0], int) and is_chat:
            raise BadPromptFile(f"Prompt {number} of {path} is of token ids, which chats do not take.")
        if isinstance(prompt[0], dict) and not is_chat:
            raise BadPromptFile(f"Prompt {number} of {path} is of messages: use --endpoint chat.")


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
