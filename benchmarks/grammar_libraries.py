"""Which grammar library: what compiling and masking cost, which schemas are supported, and what is accepted wrongly.

llguidance and xgrammar over the schemas of tests/data and the vocabulary of a served model. Each schema runs in a
process of its own with a time limit, since a library may hang, crash or fill the memory. Needs both libraries and
jsonschema (`pip install xgrammar jsonschema`); writes benchmarks/results/grammar_libraries.json.
"""

import argparse
import json
import math
import multiprocessing
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from server.model_store import resolve
from server.tokenizer import Tokenizer, load_tokenizer
from tests import data_files

MAX_STEPS = 200  # tokens of one random answer
TIME_LIMIT = 30.0  # seconds for all of one schema
LIBRARIES = ("llguidance", "xgrammar")
# What the server brings in any case, so that it does not count for a library.
_SERVER_NEEDS = frozenset(
    (
        *(
            "torch",
            "numpy",
            "pydantic",
            "typing-extensions",
            "jinja2",
            "tokenizers",
            "safetensors",
            "httpx",
            "filelock",
        ),
        *(
            "rich",
            "huggingface-hub",
            "tqdm",
            "typer",
            "hf-xet",
            "fsspec",
            "pyyaml",
            "packaging",
            "click",
            "shellingham",
        ),
        "annotated-doc",
    )
)


class Matcher(Protocol):
    """One answer under a grammar."""

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens may come next, [vocab_size]."""

    def accept(self, token_id: int) -> bool:
        """Take a token; whether it was allowed."""

    def complete(self) -> bool:
        """The answer may end here."""


class Refused(Exception):
    """The library does not compile the schema, and says why."""


class Llguidance:
    """llguidance with its default options: an unknown keyword is an error."""

    def __init__(self, tokens: list[bytes], special: list[int], eos: int, encode: Callable[[bytes], list[int]]) -> None:
        """Build its view of the vocabulary."""
        import llguidance

        self._library = llguidance

        class Vocabulary:
            eos_token_id, bos_token_id, special_token_ids = eos, None, special

            def __call__(self, text: bytes) -> list[int]:
                return encode(text)

        Vocabulary.tokens = tokens  # type: ignore[attr-defined]
        wrapper = llguidance.TokenizerWrapper(Vocabulary())
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=eos)
        self._num_tokens = len(tokens)

    def matcher(self, schema: str) -> Matcher:
        """Compile a schema. Raises Refused."""
        grammar = self._library.LLMatcher.grammar_from_json_schema(schema)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise Refused(matcher.get_error())
        return _LlguidanceMatcher(matcher, self._num_tokens)


class _LlguidanceMatcher:
    def __init__(self, matcher: Any, num_tokens: int) -> None:  # noqa: ANN401 - of the library
        self._matcher = matcher
        self._num_tokens = num_tokens

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._num_tokens].astype(bool)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())


class Xgrammar:
    """xgrammar with JSON Schema's own meaning of what a schema does not name (strict_mode off), on one thread."""

    def __init__(self, tokens: list[bytes], special: list[int], eos: int, encode: Callable[[bytes], list[int]]) -> None:
        """Build its view of the vocabulary."""
        import xgrammar

        del encode
        self._library = xgrammar
        hidden = set(special) - {eos}
        vocabulary = [b"" if i in hidden else token for i, token in enumerate(tokens)]
        self._eos = eos
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(tokens), stop_token_ids=[eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._num_tokens = len(tokens)

    def matcher(self, schema: str) -> Matcher:
        """Compile a schema. Raises Refused."""
        try:
            compiled = self._compiler.compile_json_schema(schema, strict_mode=False)
        except Exception as error:  # several kinds, none of them public
            raise Refused(str(error)) from None
        return _XgrammarMatcher(self._library, compiled, self._num_tokens, self._eos)


class _XgrammarMatcher:
    def __init__(self, library: Any, compiled: Any, num_tokens: int, eos: int) -> None:  # noqa: ANN401
        self._matcher = library.GrammarMatcher(compiled)
        self._bitmask = library.allocate_token_bitmask(1, num_tokens)
        self._num_tokens = num_tokens
        self._eos = eos

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        self._bitmask.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bitmask, 0)
        bits = self._bitmask.numpy().view(np.uint8)[0]
        return np.unpackbits(bits, bitorder="little")[: self._num_tokens].astype(bool)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def complete(self) -> bool:
        return bool(self._matcher.is_completed())


def main() -> None:
    """Measure both and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="whose vocabulary is masked")
    parser.add_argument("--stride", type=int, default=1, help="take every so many schemas only")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR / "grammar_libraries.json")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(resolve(arguments.model, Path("~/.cache/octavo").expanduser(), lambda *_: None))
    results = {}
    for name in LIBRARIES:
        facts = in_child(lambda send, name=name: send(vocabulary_cost(name, tokenizer)), TIME_LIMIT)[0]
        results[name] = {
            **facts,
            "real_schemas": real_schemas(name, tokenizer, arguments.stride),
            "official_tests": official_tests(name, tokenizer, arguments.stride),
        }
        print(json.dumps({name: results[name]}, indent=2))
    result = {"command": command_line(), "machine": machine_facts(), "vocabulary": tokenizer.vocab_size, **results}
    write_result(arguments.output, result)


def in_child(work: Callable[[Callable[[object], None]], None], limit: float) -> list[Any]:
    """What `work` sends from a process of its own, as far as it comes within `limit` seconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: work(theirs.send))
    child.start()
    theirs.close()
    sent, deadline = [], time.monotonic() + limit
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            sent.append(ours.recv())
    except EOFError:
        pass
    child.kill()
    child.join()
    return sent


def build(name: str, tokenizer: Tokenizer) -> Llguidance | Xgrammar:
    """A library over the vocabulary of a tokenizer."""
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    special = sorted(tokenizer.special_token_ids)
    library = Llguidance if name == "llguidance" else Xgrammar

    def encode(text: bytes) -> list[int]:
        return tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)

    return library(tokens, special, tokenizer.eos_token_ids[0], encode)


def vocabulary_cost(name: str, tokenizer: Tokenizer) -> dict[str, object]:
    """What the library is, and what it costs before the first schema."""
    begin, memory = time.perf_counter(), peak_mib()
    build(name, tokenizer)
    return {
        "version": version(name),
        "further_packages": further_packages(name),
        "import_and_vocabulary_seconds": round(time.perf_counter() - begin, 2),
        "import_and_vocabulary_mib": round(peak_mib() - memory, 1),
    }


def further_packages(name: str) -> dict[str, float]:
    """Installed size, in MB, of the library and of whatever it brings that the server does not have already."""
    wanted, sizes = [name], {}
    while wanted:
        package = wanted.pop()
        if package in sizes or package in _SERVER_NEEDS:
            continue
        try:
            found = distribution(package)
        except PackageNotFoundError:
            continue
        paths = [Path(str(found.locate_file(path))) for path in found.files or []]
        sizes[package] = round(sum(path.stat().st_size for path in paths if path.is_file()) / 1e6, 1)
        needed = [line for line in found.requires or [] if "extra ==" not in line]
        wanted += [line.split(";")[0].split("[")[0].strip().rstrip("<>=!~ .0123456789,") for line in needed]
    return sizes


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def real_schemas(name: str, tokenizer: Tokenizer, stride: int) -> dict[str, object]:
    """Compile what people wrote, and answer each of them at random."""
    library = build(name, tokenizer)
    compiled: list[dict[str, float]] = []
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    mask_seconds: list[float] = []
    answers: Counter[str] = Counter()
    for row in data_files.benchmark_schemas()[::stride]:
        sent = in_child(lambda send, row=row: answer_at_random(library, tokenizer, row["schema"], send), TIME_LIMIT)
        if not sent:
            outcomes["crashed or too slow"] += 1
            continue
        if "refused" in sent[0]:
            outcomes["refused"] += 1
            reasons[sent[0]["refused"].split("\n")[0][:80]] += 1
            continue
        outcomes["compiled"] += 1
        compiled.append(sent[0])
        if len(sent) == 1:
            answers["crashed or too slow"] += 1
            continue
        mask_seconds += sent[1]["mask_seconds"]
        answers[sent[1]["answer"]] += 1
    return {
        "schemas": dict(outcomes),
        "refused_because": dict(reasons.most_common(12)),
        "compile_ms": quantiles([1e3 * facts["seconds"] for facts in compiled]),
        "compile_mib": quantiles([facts["mib"] for facts in compiled]),
        "mask_us": quantiles([1e6 * seconds for seconds in mask_seconds]),
        "random_answers": dict(answers),
    }


def answer_at_random(
    library: Llguidance | Xgrammar, tokenizer: Tokenizer, schema: dict[str, Any], send: Callable[[object], None]
) -> None:
    """Compile, then sample: half of the tokens among those that close something, so that answers end."""
    memory, begin = peak_mib(), time.perf_counter()
    try:
        matcher = library.matcher(json.dumps(schema))
    except Refused as refused:
        send({"refused": str(refused)})
        return
    send({"seconds": time.perf_counter() - begin, "mib": peak_mib() - memory})
    closing = np.array([any(c in tokenizer.token_bytes(i) for c in b'"}]') for i in range(tokenizer.vocab_size)])
    end = list(tokenizer.eos_token_ids)
    rng = random.Random(0)
    token_ids: list[int] = []
    mask_seconds = []
    verdict = "unfinished"
    for _ in range(MAX_STEPS):
        begin = time.perf_counter()
        allowed = matcher.allowed()
        mask_seconds.append(time.perf_counter() - begin)
        if matcher.complete():
            verdict = judge(schema, tokenizer.decode(token_ids))
            break
        allowed[end] = False
        choices = np.flatnonzero(allowed & closing)
        if rng.random() < 0.5 or not len(choices):
            choices = np.flatnonzero(allowed)
        if not len(choices):
            verdict = "dead end"
            break
        token_ids.append(int(choices[rng.randrange(len(choices))]))
        if not matcher.accept(token_ids[-1]):
            verdict = "own token refused"
            break
    send({"mask_seconds": mask_seconds, "answer": verdict})


def judge(schema: dict[str, Any], text: str) -> str:
    """Whether an answer satisfies its schema."""
    import jsonschema

    try:
        value = json.loads(text)
    except ValueError:
        return "no JSON"
    try:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        return "valid" if validator(schema).is_valid(value) else "invalid"
    except Exception:
        return "not judged"


def official_tests(name: str, tokenizer: Tokenizer, stride: int) -> dict[str, object]:
    """Instances with verdicts: what is accepted wrongly, what is refused though it is right."""
    library = build(name, tokenizer)
    counts: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for row in data_files.schema_tests()[::stride]:
        sent = in_child(lambda send, row=row: verdicts(library, tokenizer, row, send), TIME_LIMIT)
        counts["schemas " + (sent[0] if sent else "crashed or too slow")] += 1
        for test, accepted in zip(row["tests"], sent[1:], strict=False):
            counts[f"{'valid' if test['valid'] else 'invalid'} {'accepted' if accepted else 'refused'}"] += 1
            if accepted and not test["valid"]:
                wrong[row["file"]] += 1
    return {"counts": dict(counts), "invalid_accepted_in": dict(wrong.most_common(12))}


def verdicts(
    library: Llguidance | Xgrammar, tokenizer: Tokenizer, row: dict[str, Any], send: Callable[[object], None]
) -> None:
    """Send how compiling went, then for each instance whether the library accepts it as an answer."""
    schema = json.dumps(row["schema"])
    try:
        library.matcher(schema)
    except Refused:
        send("refused")
        return
    send("compiled")
    for test in row["tests"]:
        matcher = library.matcher(schema)
        text = json.dumps(test["data"], ensure_ascii=False)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        send(all(matcher.accept(i) for i in token_ids) and matcher.complete())


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, tail and worst."""
    if not values:
        return {}
    ordered = sorted(values)
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[math.ceil(share * len(ordered)) - 1], 2) for name, share in places.items()}


if __name__ == "__main__":
    main()
