"""The command line of the load test: every flag, its range, and which go together. Reads nothing and runs nothing."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from server.load_test.lengths import BadLengths, Lengths, read_lengths
from server.settings_error import SettingsError, suggestion

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_USERS = 8
DEFAULT_REQUESTS = 100
DEFAULT_SEARCH_SECONDS = 30.0
DEFAULT_START_RATE = 1.0
_LEAST_SESSIONS = 10  # of a trial: one that misses by chance must not decide it
_SYNTHETIC = ("prefix_tokens", "num_prefixes", "turns", "input_tokens", "prompt_ids")
_TRACE = ("first", "until", "sample", "tokens_per_run", "token_scale", "output_scale", "think_scale", "session_spread")
# Flags that mean something beside another only: flag -> those, one of which must be there.
_NEEDS = {
    **dict.fromkeys(_TRACE, ("trace",)),
    "burstiness": ("rate", "find_rate"),
    "max_concurrency": ("rate", "trace", "prompts", "find_rate"),
    "speed": ("trace", "prompts"),
    "num_prefixes": ("prefix_tokens",),
    "slo_share": ("find_rate", "slo_ttft", "slo_tpot", "slo_itl", "slo_e2e"),
    "precision": ("find_rate",),
    "least_rate": ("find_rate",),
    "most_rate": ("find_rate",),
}
_EXCLUDES = (
    ("prompts", "trace"),
    ("concurrency", "rate"),
    ("concurrency", "arrivals"),
    ("concurrency", "max_concurrency"),
    ("concurrency", "find_rate"),
    ("concurrency", "speed"),
    ("start_at", "find_rate"),
    ("speed", "rate"),
    ("speed", "find_rate"),
    ("tokens_per_run", "token_scale"),
    ("api_key", "api_key_file"),
    *((name, "prompts") for name in _SYNTHETIC),
    *((name, "trace") for name in _SYNTHETIC if name != "prompt_ids"),
    ("output_tokens", "trace"),
    ("think_time", "trace"),
)


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as one sentence, without the whole usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message[0].upper() + message[1:].rstrip(".") + ".")


def _number(least: float, most: float = math.inf, kind: Callable[[str], float] = float) -> Callable[[str], Any]:
    """A reader of numbers in a range, both ends included."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return value

    return read


def _integer(least: int) -> Callable[[str], Any]:
    return _number(least, 2**31 - 1, int)


def _seconds(text: str) -> float:
    """Seconds, or with a unit: 200ms, 2s, 5m, 1h."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("mhs")
    try:
        value = float(number) * (units[text[len(number) :]] if text != number else 1.0)
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 2, 2s, 200ms or 5m") from None
    if not 0 < value < 1e8:
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0")
    return value


def _lengths(text: str) -> Lengths:
    try:
        return read_lengths(text)
    except BadLengths as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


def _id_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of token ids such as 1000-30000")
    if int(first) >= int(last) or int(last) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range, or none of token ids")
    return int(first), int(last) + 1


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable() or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text!r} is no header such as 'X-Team: search'")
    return name.strip(), value.strip()


def build_parser(prog: str) -> argparse.ArgumentParser:
    """All options, in groups."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description="Sends load to a server that speaks OpenAI's API and reports what its users would see: latencies, "
        "throughput, the share served in time, errors.",
        epilog="Times are seconds, or such as 200ms or 5m. LENGTHS are N, A-B, normal:MEAN,DEVIATION, "
        "lognormal:MEDIAN,SIGMA or exponential:MEAN, in tokens. Ends with 1 if nothing was answered, --fail-under is "
        "missed or no rate was found; with 2 for what cannot be run.",
    )
    _add_server_options(parser.add_argument_group("server"))
    _add_load_options(parser.add_argument_group("load: --rate is an open loop, --concurrency a closed one"))
    _add_prompt_options(parser.add_argument_group("prompts: made up, or of a file"))
    _add_trace_options(parser.add_argument_group("prompts of a trace"))
    _add_objective_options(parser.add_argument_group("objective"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="PATH", help='write all numbers there; "-": standard output')
    output.add_argument("--html", type=Path, metavar="PATH", help="write a report with plots there")
    output.add_argument("--no-records", action="store_true", help="leave single requests out of the JSON")
    output.add_argument("--no-progress", action="store_true", help="show nothing while the load runs")
    return parser


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"(default: {DEFAULT_URL})")
    group.add_argument("--model", help="(default: the first that the server lists)")
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="(default: completions)"
    )
    group.add_argument("--api-key", metavar="KEY", help="[env: OPENAI_API_KEY]")
    group.add_argument("--api-key-file", type=Path, metavar="PATH", help="file whose first line is the key")
    group.add_argument("--header", type=_header, action="append", default=[], metavar="NAME:VALUE", help="repeatable")
    group.add_argument("--insecure", action="store_true", help="trust any TLS certificate")
    group.add_argument(
        "--timeout", type=_seconds, default=600.0, help="most time for one answer, from its sending (default: 600)"
    )
    group.add_argument("--temperature", type=_number(0, 100), help="(default: not sent)")
    group.add_argument("--ignore-eos", action="store_true", help="ask for answers of exactly the wanted length")
    group.add_argument(
        "--max-tokens-field", default="max_tokens", metavar="NAME", help="or max_completion_tokens (default: first)"
    )
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of each request")
    group.add_argument("--no-usage", action="store_true", help="do not ask for token counts; pieces of text count")


def _add_load_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rate", type=_number(1e-6, 1e6), metavar="R", help="sessions that start per second")
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant", "gamma", "recorded"),
        help="(default: recorded where a trace or file has times, else poisson)",
    )
    group.add_argument("--burstiness", type=_number(0.001, 1000), metavar="SHAPE", help="of gamma; less is burstier")
    group.add_argument("--concurrency", type=_integer(1), metavar="N", help=f"users (default: {DEFAULT_USERS})")
    group.add_argument("--max-concurrency", type=_integer(1), metavar="N", help="open at once in an open loop")
    group.add_argument(
        "--num-requests",
        type=_integer(1),
        metavar="N",
        help=f"sessions in all; one request each but where they have turns (default: {DEFAULT_REQUESTS})",
    )
    group.add_argument("--duration", type=_seconds, metavar="SECONDS", help="in which sessions may start")
    group.add_argument(
        "--start-at", type=_number(0), metavar="TIME", help="Unix time, for several clients (default: at once)"
    )
    group.add_argument("--warm-up", type=_integer(0), default=2, metavar="N", help="before, not counted (default: 2)")
    group.add_argument("--seed", type=_integer(0), help="for whatever is drawn (default: another each time)")


def _add_prompt_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-tokens", type=_lengths, metavar="LENGTHS", help="of a prompt (default: 256)")
    group.add_argument("--output-tokens", type=_lengths, metavar="LENGTHS", help="of an answer (default: 64)")
    group.add_argument("--prefix-tokens", type=_integer(1), metavar="N", help="with which prompts begin, shared")
    group.add_argument("--num-prefixes", type=_integer(1), metavar="N", help="different ones (default: 1)")
    group.add_argument("--turns", type=_lengths, metavar="LENGTHS", help="of a conversation (default: 1)")
    group.add_argument("--think-time", type=_seconds, metavar="SECONDS", help="between an answer and the next question")
    group.add_argument("--prompts", type=Path, metavar="PATH", help=".jsonl or .json of prompts, or lines of text")
    group.add_argument(
        "--prompt-ids", type=_id_range, metavar="FIRST-LAST", help="made-up prompts of token ids, not of words"
    )
    group.add_argument("--no-calibrate", action="store_true", help="take a word for a token, ask nothing beforehand")
    group.add_argument(
        "--max-model-len", type=_integer(2), metavar="N", help="leave out longer ones of a trace (default: as listed)"
    )


def _add_trace_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", type=Path, metavar="PATH", help="Mooncake, Azure or coding-assistant file; ServeGen folder#model:s"
    )
    group.add_argument("--speed", type=_number(1e-6, 1e6), metavar="X", help="so many times as fast as recorded")
    group.add_argument("--first", type=_integer(1), metavar="N", help="only the first N sessions")
    group.add_argument("--until", type=_seconds, metavar="SECONDS", help="only what starts in the trace's first")
    group.add_argument("--sample", type=_number(1e-9, 1), metavar="SHARE", help="about this share, prefixes kept whole")
    group.add_argument("--tokens-per-run", type=_integer(1), metavar="N", help="tokens that a shared run stands for")
    group.add_argument(
        "--token-scale", type=_number(1e-6, 1e3), metavar="X", help="prompts and answers X times as long"
    )
    group.add_argument("--output-scale", type=_number(1e-6, 1e3), metavar="X", help="answers alone")
    group.add_argument("--think-scale", type=_number(0, 1e3), metavar="X", help="recorded think times X times as long")
    group.add_argument(
        "--session-spread", type=_seconds, metavar="SECONDS", help="conversations start within (default: 3600)"
    )


def _add_objective_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo-ttft", type=_seconds, metavar="SECONDS", help="most time to the first token")
    group.add_argument("--slo-tpot", type=_seconds, metavar="SECONDS", help="most mean time per further token")
    group.add_argument("--slo-itl", type=_seconds, metavar="SECONDS", help="most time between any two pieces of text")
    group.add_argument("--slo-e2e", type=_seconds, metavar="SECONDS", help="most time to the end of an answer")
    group.add_argument(
        "--slo-share", type=_number(0.01, 1), metavar="SHARE", help="of requests to be served so (default: 0.9)"
    )
    group.add_argument("--fail-under", action="store_true", help="end with 1 where fewer are: for automatic checks")
    group.add_argument("--find-rate", action="store_true", help="search the highest rate that keeps the objective")
    group.add_argument("--precision", type=_number(0.005, 1), metavar="P", help="of the rate found (default: 0.1)")
    group.add_argument(
        "--least-rate", type=_number(1e-6, 1e6), metavar="R", help="to be tried (default: 10 in a trial)"
    )
    group.add_argument("--most-rate", type=_number(1e-6, 1e6), metavar="R", help="to be tried (default: 10000)")


def parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """The options.

    Raises:
        SettingsError: one cannot be used, or not beside another.
    """
    parser = build_parser(prog)
    options, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        name = unknown[0].split("=")[0]
        known = [text for action in parser._actions for text in action.option_strings]
        if name.startswith("-"):
            raise SettingsError(f"There is no flag {name}{suggestion(name, known)}")
        raise SettingsError(f"There is one argument too many: {name}.")
    _check_together(options)
    return options


def has_objective(options: argparse.Namespace) -> bool:
    """Whether a limit was given."""
    return any(getattr(options, name) is not None for name in ("slo_ttft", "slo_tpot", "slo_itl", "slo_e2e"))


def _check_together(options: argparse.Namespace) -> None:
    def is_given(name: str) -> bool:
        return getattr(options, name) not in (None, False)

    for one, other in _EXCLUDES:
        if is_given(one) and is_given(other):
            raise SettingsError(f"{_flag(one)} and {_flag(other)} do not go together.")
    for name, needed in _NEEDS.items():
        if is_given(name) and not any(map(is_given, needed)):
            raise SettingsError(f"{_flag(name)} needs {' or '.join(map(_flag, needed))}.")
    if (options.find_rate or options.fail_under) and not has_objective(options):
        flag = "--find-rate" if options.find_rate else "--fail-under"
        raise SettingsError(f"{flag} needs an objective: --slo-ttft, --slo-tpot, --slo-itl or --slo-e2e.")
    if options.find_rate and options.arrivals == "recorded" and not options.trace and not options.prompts:
        raise SettingsError("--arrivals recorded needs --trace or --prompts.")
    if options.arrivals in ("poisson", "constant", "gamma") and not (options.rate or options.find_rate):
        raise SettingsError(f"--arrivals {options.arrivals} needs --rate or --find-rate.")
    if options.burstiness is not None and options.arrivals != "gamma":
        raise SettingsError("--burstiness needs --arrivals gamma.")
    if options.find_rate:
        _check_rates(options)
    if options.prompt_ids and options.endpoint == "chat":
        raise SettingsError("--prompt-ids needs --endpoint completions: chats take no token ids.")
    if options.prompt_ids and options.turns:
        raise SettingsError("--prompt-ids and --turns do not go together: answers come as text.")


def least_rate(options: argparse.Namespace) -> float:
    """The lowest rate that a search tries: so many sessions in a trial at least that it can be judged."""
    return float(options.least_rate or _LEAST_SESSIONS / _trial_seconds(options))


def _trial_seconds(options: argparse.Namespace) -> float:
    """How long sessions of a trial start; endless where their number ends it."""
    return float(options.duration or (math.inf if options.num_requests else DEFAULT_SEARCH_SECONDS))


def _check_rates(options: argparse.Namespace) -> None:
    seconds = _trial_seconds(options)
    for name in ("rate", "least_rate", "most_rate"):
        rate = getattr(options, name)
        if rate is not None and rate * seconds < _LEAST_SESSIONS - 0.01:
            raise SettingsError(
                f"{_flag(name)}: a trial at {rate:g} sessions/s would have about {rate * seconds:.3g} sessions in "
                f"{seconds:g} s, and it takes {_LEAST_SESSIONS} to judge one: give {_flag(name)} "
                f"{_LEAST_SESSIONS / seconds:.4g}, or --duration {_LEAST_SESSIONS / rate:.4g}."
            )
    if options.most_rate is not None and options.most_rate < least_rate(options):
        raise SettingsError(f"--most-rate {options.most_rate:g} lies below --least-rate {least_rate(options):g}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
