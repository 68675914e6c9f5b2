"""All that is known of a load test when it is over, as JSON has it. Holds no key and no header's value."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels import __version__
from server.load_test.record import Record
from server.load_test.search import Found
from server.load_test.trials import Outcome


@dataclass(frozen=True, slots=True)
class Result:
    """One load test."""

    began: datetime
    server: Mapping[str, Any]  # url, model, endpoint, max_model_len
    load: str  # how requests arrived, for a person
    prompts: str
    seed: int
    notes: tuple[str, ...]
    request_fields: Mapping[str, Any]  # what each request had beside its prompt
    calibration: Mapping[str, Any]
    outcome: Outcome  # of the load; of a search, the trial of the rate that was found, or the last
    goal: float  # share of requests that should keep the objective
    search: Found | None
    trials: tuple[Outcome, ...]  # of a search


def to_json(result: Result, *, has_records: bool) -> dict[str, Any]:
    """Plain values, all seconds and tokens."""
    values: dict[str, Any] = {
        "octavo": __version__,
        "began": result.began.astimezone(UTC).isoformat(timespec="seconds"),
        "client": client_facts(),
        "server": dict(result.server),
        "load": result.load,
        "prompts": result.prompts,
        "seed": result.seed,
        "notes": list(result.notes),
        "request_fields": dict(result.request_fields),
        "calibration": dict(result.calibration),
        "goal": result.goal,
        "summary": result.outcome.summary.to_json(),
    }
    if result.search is not None:
        found = result.search
        values["search"] = {
            "rate": found.rate,
            "broken_rate": found.broken_rate,
            "is_complete": found.is_complete,
            "trials": [
                {**asdict(trial), "summary": outcome.summary.to_json()}
                for trial, outcome in zip(found.trials, result.trials, strict=True)
            ],
        }
    if has_records:
        values["records"] = [_row(record) for record in sorted(result.outcome.records, key=lambda each: each.due)]
    return values


def client_facts() -> dict[str, Any]:
    """Of the machine that the load came from."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processors": os.cpu_count(),
    }


def write_json(result: Result, path: Path, *, has_records: bool) -> None:
    """Write it as a file, or to standard output for the path `-`."""
    text = json.dumps(to_json(result, has_records=has_records), indent=1, ensure_ascii=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _row(record: Record) -> dict[str, Any]:
    times = record.piece_times
    return {
        "session": record.session,
        "turn": record.turn,
        "due": round(record.due, 6),
        "sent": _rounded(record.sent),
        "first": round(times[0], 6) if times else None,
        "last": round(times[-1], 6) if times else None,
        "ended": _rounded(record.ended),
        "pieces": len(times),
        "max_tokens": record.max_tokens,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error_kind,
        "error_message": record.error_message,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
