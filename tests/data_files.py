"""Real texts for the tests, read from tests/data (its README names sources and licences). Knows no code under test."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

DATA_DIR = Path(__file__).parent / "data"


def _json_lines(name: str) -> list[dict[str, Any]]:
    # Not splitlines(): the texts hold U+2028 and other characters that it takes for line ends.
    return [json.loads(line) for line in (DATA_DIR / name).read_text(encoding="utf-8").split("\n") if line]


@cache
def mt_bench_turns() -> tuple[tuple[str, ...], ...]:
    """The user turns of the 80 MT-bench conversations (two each)."""
    return tuple(tuple(row["turns"]) for row in _json_lines("mt_bench/question.jsonl"))


@cache
def mt_bench_prompts() -> tuple[str, ...]:
    """80 English questions: the first turns of MT-bench."""
    return tuple(turns[0] for turns in mt_bench_turns())


@cache
def gsm8k_prompts() -> tuple[str, ...]:
    """50 school mathematics questions."""
    return tuple(row["question"] for row in _json_lines("gsm8k/test_50.jsonl"))


@cache
def humaneval_prompts() -> tuple[str, ...]:
    """40 beginnings of Python functions, to be completed."""
    return tuple(row["prompt"] for row in _json_lines("humaneval/HumanEval_40.jsonl"))


@cache
def humaneval_functions() -> tuple[str, ...]:
    """The same 40 functions, complete."""
    return tuple(row["prompt"] + row["canonical_solution"] for row in _json_lines("humaneval/HumanEval_40.jsonl"))


@cache
def gsm8k_dialogues() -> tuple[str, ...]:
    """50 questions with their answers as two speakers, without the marks of a calculator in the answers."""
    return tuple(
        f"User: {row['question']}\nAssistant: {re.sub('<<.*?>>', '', row['answer'])}"
        for row in _json_lines("gsm8k/test_50.jsonl")
    )


@cache
def prose() -> str:
    """The beginning of a novel of 1895: 20 kB of English."""
    return (DATA_DIR / "texts/time_machine_part.txt").read_text(encoding="utf-8")


@cache
def mgsm_prompts() -> dict[str, tuple[str, ...]]:
    """Language code -> 10 questions, the same in en es fr de ru zh ja th sw bn te."""
    questions: dict[str, list[str]] = {}
    for row in _json_lines("mgsm/mgsm_10.jsonl"):
        questions.setdefault(row["lang"], []).append(row["question"])
    return {lang: tuple(texts) for lang, texts in questions.items()}


@cache
def emoji() -> tuple[str, ...]:
    """Every fully-qualified emoji: 1 to 10 code points each."""
    lines = (DATA_DIR / "unicode/emoji.tsv").read_text(encoding="utf-8").split("\n")[1:]
    return tuple(line.split("\t")[1] for line in lines if line)


@cache
def grapheme_tests() -> tuple[tuple[str, ...], ...]:
    """Unicode's grapheme-cluster test lines; each is the clusters of one string, in order."""
    rows = []
    for line in (DATA_DIR / "unicode/GraphemeBreakTest.txt").read_text(encoding="utf-8").split("\n"):
        marks = line.split("#")[0].strip()
        if marks:
            clusters = [part.replace("\u00d7", " ").split() for part in marks.split("\u00f7") if part.strip()]
            rows.append(tuple("".join(chr(int(code, 16)) for code in cluster) for cluster in clusters))
    return tuple(rows)


@cache
def naughty_strings() -> tuple[str, ...]:
    """514 strings that break software."""
    return tuple(json.loads((DATA_DIR / "naughty_strings/blns.json").read_text(encoding="utf-8")))


@cache
def openai_examples() -> tuple[dict[str, str], ...]:
    """The 24 examples of OpenAI's description: path, method, title, curl, response."""
    return tuple(_json_lines("openai/examples.jsonl"))


@cache
def openai_fields() -> dict[str, tuple[str, ...]]:
    """Name of a schema of OpenAI's description -> paths of its fields."""
    found = json.loads((DATA_DIR / "openai/fields.json").read_text(encoding="utf-8"))
    return {schema: tuple(paths) for schema, paths in found["schemas"].items()}


@cache
def openai_response_events() -> dict[str, tuple[str, ...]]:
    """Type of an event in a stream of responses -> names of its fields."""
    found = json.loads((DATA_DIR / "openai/fields.json").read_text(encoding="utf-8"))
    return {event: tuple(fields) for event, fields in found["response_events"].items()}


@cache
def benchmark_schemas() -> tuple[dict[str, Any], ...]:
    """371 JSON schemas that people wrote: rows of `id`, `subset` and `schema`."""
    return tuple(_json_lines("jsonschemabench/schemas.jsonl"))


@cache
def schema_tests() -> tuple[dict[str, Any], ...]:
    """JSON Schema's official tests: rows of `file`, `description`, `schema` and `tests` (`data`, `valid`)."""
    return tuple(_json_lines("json_schema_test_suite/draft2020-12.jsonl"))


@cache
def function_calls() -> tuple[dict[str, Any], ...]:
    """75 questions for functions: rows of `id`, `messages`, `tools` (OpenAI's form) and `calls` ([name, arguments])."""
    return tuple(
        {
            "id": row["id"],
            "messages": row["messages"],
            "tools": [{"type": "function", "function": _json_schema_types(function)} for function in row["functions"]],
            "calls": [
                [name, _first(arguments)] for call in row["ground_truth"] or () for name, arguments in call.items()
            ],
        }
        for row in _json_lines("bfcl/calls_75.jsonl")
    )


def _json_schema_types(schema: Any) -> Any:
    """The same with the types that JSON Schema has."""
    if isinstance(schema, list):
        return [_json_schema_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {"dict": "object", "float": "number", "tuple": "array"}
    return {
        key: renamed.get(value, value) if key == "type" and isinstance(value, str) else _json_schema_types(value)
        for key, value in schema.items()
        if (key, value) != ("type", "any")
    }


def _first(arguments: dict[str, list[Any]]) -> dict[str, Any]:
    """Of each argument the first value that is accepted; none where the first is that it is absent."""
    chosen = {name: values[0] for name, values in arguments.items() if values and values[0] != ""}
    return {
        name: _first(value)
        if isinstance(value, dict) and all(isinstance(inner, list) for inner in value.values())
        else value
        for name, value in chosen.items()
    }


@cache
def mixed_prompts() -> tuple[str, ...]:
    """30 prompts of every kind (English, mathematics, code, ten other languages), for runs that must be short."""
    foreign = [texts[index] for index, texts in enumerate(list(mgsm_prompts().values())[1:])]
    return (*mt_bench_prompts()[::10], *gsm8k_prompts()[:6], *humaneval_prompts()[:6], *foreign)
