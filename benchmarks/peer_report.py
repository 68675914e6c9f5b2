"""Writes the page about peers.py's result: ratios with goals, latencies, versions. Knows the result and no more."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown_table import markdown_table

_OURS = "octavo"
_TITLES = {"octavo": "Octavo", "llama.cpp": "llama.cpp", "vllm": "vLLM"}


def report(result: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    names = [server["name"] for server in result["servers"] if server["version"] is not None]
    parts = [_head(result), _servers(result)]
    if result["points"]:
        parts += [_speed(result, names), _first_token(result, names), _between(result, names), _shares(result, names)]
    parts += _troubles(result)
    return "\n\n".join(parts) + "\n"


def _head(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return f"""# Octavo beside its peers

`make peers` starts each server on the same model and machine, drives the same loads, and writes this page and
`benchmarks/results/peers.json`. The peers come from environments of their own; nothing is installed.

Model: `{result["model"]}`. Machine: {machine["cores"]} cores of {machine["cpu"]}, {machine["memory_gib"]} GiB, \
commit {machine["commit"]}, {machine["date"][:10]}. Command: `{result["command"]}`.

Closed loop: each client sends its next request when the last one is answered. Greedy, streamed, exactly as many tokens
as asked for. All prompts are different and new in every round; the chats of a round share their system prompt, which
was sent once before. The servers take turns at every load; one that computes with nothing to do is held still
(SIGSTOP) while others are measured. All figures are medians over the rounds; a ratio is taken in each round, and its
median is reported. The clients share the processors with the server; they keep what arrives and read it
after the clock has stopped."""


def _servers(result: Mapping[str, Any]) -> str:
    rows = [
        (
            _TITLES[server["name"]],
            server["version"] or "",
            f"`{server['command']}`",
            server["why"],
            _number(server.get("start_seconds"), ".1f"),
            _number(server.get("idle_processors"), ".2f") + (", held still" if server.get("is_held") else ""),
        )
        for server in result["servers"]
    ]
    head = ("server", "version", "command", "why", "s to be ready", "processors busy when idle")
    return f"## Servers\n\n{markdown_table(head, rows)}"


def _speed(result: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = [
        (*_where(point), *_each(point, names, "output_tokens_per_second", 1, ",.1f"), *_against(point, names, "speed"))
        for point in result["points"]
    ]
    return f"""## Output tokens per second

The goal is a ratio against the best peer, at least.

{markdown_table(("load", "clients", *_titles(names), *_ratio_titles(names), "goal"), rows)}"""


def _first_token(result: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = [
        (
            *_where(point),
            *_each(point, names, "ttft_p50", 1e3, ",.0f"),
            *_each(point, names, "ttft_p90", 1e3, ",.0f"),
            *_against(point, names, "first_token"),
        )
        for point in result["points"]
    ]
    head = ("load", "clients", *_titles(names, " p50"), *_titles(names, " p90"), *_ratio_titles(names), "goal")
    return f"""## Time to first token, ms

The ratio is of the medians of a round; the goal is a ratio against the best peer, at most.

{markdown_table(head, rows)}"""


def _between(result: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = [
        (
            *_where(point),
            *_each(point, names, "inter_token_p50", 1e3, ",.1f"),
            *_each(point, names, "inter_token_p90", 1e3, ",.1f"),
        )
        for point in result["points"]
    ]
    head = ("load", "clients", *_titles(names, " p50"), *_titles(names, " p90"))
    return f"## Between tokens, ms\n\n{markdown_table(head, rows)}"


def _shares(result: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = [
        (
            *_where(point),
            *_each(point, names, "server_seconds_per_token", 1e3, ".1f"),
            *_each(point, names, "client_processors", 1, ".3f"),
            *_each(point, names, "prompt_tokens", 1, ",.0f"),
            *_each(point, names, "cached_tokens", 1, ",.0f"),
        )
        for point in result["points"]
    ]
    columns = [title for kind in (" ms", " clients", " in", " cached") for title in _titles(names, kind)]
    return f"""## What it took

Processor time of all the server's processes for each output token (ms), the processors that the clients kept busy, and
the mean number of tokens of a prompt as the server counted them, and of those the ones that it had in its cache.

{markdown_table(("load", "clients", *columns), rows)}"""


def _troubles(result: Mapping[str, Any]) -> list[str]:
    lines = [f"- {_TITLES[server['name']]}: {server['error']}" for server in result["servers"] if server["error"]]
    for point in result["points"]:
        for name, of_server in point["servers"].items():
            where = f"{_TITLES[name]}, {point['label']}, clients: {point['num_clients']}"
            lines += [f"- {where}: {count} times: {error}" for error, count in of_server["errors"].items()]
    lines += [f"- left out: {line}" for line in result.get("left_out", ())]
    return ["## What went wrong\n\n" + "\n".join(lines)] if lines else []


def _where(point: Mapping[str, Any]) -> tuple[str, str]:
    return point["label"], str(point["num_clients"])


def _titles(names: Sequence[str], suffix: str = "") -> list[str]:
    return [_TITLES[name] + suffix for name in names]


def _ratio_titles(names: Sequence[str]) -> list[str]:
    return [f"Octavo / {_TITLES[name]}" for name in names if name != _OURS]


def _each(point: Mapping[str, Any], names: Sequence[str], what: str, factor: float, how: str) -> list[str]:
    values = [point["servers"][name][what] for name in names]
    return [_number(None if value is None else value * factor, how) for value in values]


def _against(point: Mapping[str, Any], names: Sequence[str], what: str) -> list[str]:
    """Ratios against each peer, and the goal with whether it was reached."""
    figure = {"speed": "output_tokens_per_second", "first_token": "ttft_p50"}[what]
    ratios = [_number(point["ratios"][name][figure], ".2f") for name in names if name != _OURS]
    reached = {True: " (reached)", False: " (not reached)", None: ""}[point[f"{what}_reached"]]
    return [*ratios, _number(point[f"{what}_goal"], ".1f") + reached]


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
