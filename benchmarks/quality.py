"""What quantised weights and KV caches cost in quality: perplexity and the likeliest token, against float32.

Fixed texts of three kinds (prose, code, dialogue) are scored as prompts by the engine's own steps, with every
combination of --quantization and --kv-cache-dtype. The float32 weights are the file's, dequantised. Writes
benchmarks/results/quality.json.
"""

import argparse
import gc
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import RESULTS_DIR, command_line, machine_facts, write_result
from benchmarks.served_model import ServedModel
from scheduler.sampling_params import SamplingParams
from server.engine_sizing import UnservableSettings
from server.model_store import resolve
from server.tokenizer import load_tokenizer
from tests import data_files

WINDOW = 512  # tokens that are scored with nothing before them
WINDOWS = {"prose": 8, "code": 6, "dialogue": 6}  # 20 windows: 10,220 tokens are predicted
MODELS = ("smollm2", "gemma3-270m")
EXACT = ("none", "float32")  # what the others are held against: float32 weights and a float32 cache
QUANTIZATIONS = ("none", "int8", "gguf")
CACHE_DTYPES = ("float32", "bfloat16", "int8")
DEFAULT = ("auto", "auto")
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are scored together, from the second on."""

    kind: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of the tokens of all windows but the first of each, end to end."""

    logprobs: np.ndarray  # [num_tokens] float64, of each token after those before it
    likeliest: np.ndarray  # [num_tokens] int64, the token it holds likeliest there


@dataclass(frozen=True, slots=True)
class Quality:
    """One combination, against float32."""

    quantization: str
    kv_cache_dtype: str
    num_tokens: int
    perplexity: float
    ratio: float  # to the perplexity of float32
    ratio_error: float  # one standard error of the ratio: the same tokens are compared in pairs
    ratio_by_kind: dict[str, float]
    agreement: float  # part of the places where the same token is the likeliest


def windows_of(texts: Mapping[str, Sequence[int]], bos: Sequence[int]) -> list[Window]:
    """As many windows of each kind as WINDOWS says, one after the other, each begun with `bos`.

    Raises:
        ValueError: a text is too short.
    """
    windows = []
    for kind, count in WINDOWS.items():
        size = WINDOW - len(bos)
        if len(texts[kind]) < count * size:
            raise ValueError(f"{kind} has {len(texts[kind])} tokens, and {count} windows need {count * size}")
        windows += [Window(kind, (*bos, *texts[kind][start : start + size])) for start in range(0, count * size, size)]
    return windows


def compare(setting: tuple[str, str], windows: Sequence[Window], scores: Scores, exact: Scores) -> Quality:
    """Hold scores against the exact ones of the same windows."""
    kinds = np.repeat([window.kind for window in windows], [len(window.token_ids) - 1 for window in windows])
    losses = exact.logprobs - scores.logprobs  # nats that each token loses
    ratio = math.exp(losses.mean())
    return Quality(
        *setting,
        num_tokens=len(losses),
        perplexity=math.exp(-scores.logprobs.mean()),
        ratio=ratio,
        ratio_error=ratio * float(losses.std(ddof=1)) / math.sqrt(len(losses)),
        ratio_by_kind={str(kind): math.exp(losses[kinds == kind].mean()) for kind in dict.fromkeys(kinds.tolist())},
        agreement=float((scores.likeliest == exact.likeliest).mean()),
    )


def score(model: ServedModel, windows: Sequence[Window]) -> Scores:
    """Run the windows as prompts, each in one or more steps of its own."""
    logprobs: list[float] = []
    likeliest: list[int] = []
    budget = model.config.max_num_batched_tokens or WINDOW
    for window in windows:
        length = len(window.token_ids)
        block_ids = range(-(-length // model.info.block_size))
        results = [model.start(window.token_ids, SCORED, block_ids, 0, min(budget, length))]
        results += [model.proceed(start, min(budget, length - start)) for start in range(budget, length, budget)]
        model.finish()
        found = [token for result in results for token in result.prompt_logprobs]
        assert [token.token_id for token in found] == list(window.token_ids[1:]), "every token is scored, in order"
        logprobs += [token.logprob for token in found]
        likeliest += [token.top[0][0] for token in found]
    return Scores(np.array(logprobs), np.array(likeliest))


def model_windows(path: Path) -> list[Window]:
    """The fixed texts in the model's own tokens."""
    tokenizer = load_tokenizer(path)
    texts = {
        "prose": data_files.prose(),
        "code": "\n\n".join(data_files.humaneval_functions()),
        "dialogue": "\n\n".join(data_files.gsm8k_dialogues()),
    }
    # What the tokenizer makes of nothing is what it puts before every text.
    return windows_of(
        {kind: tokenizer.encode(text, add_special_tokens=False) for kind, text in texts.items()}, tokenizer.encode("")
    )


def measure(path: Path, settings: Sequence[tuple[str, str]], progress: Progress) -> list[Quality]:
    """Score the texts with every setting, the exact one first."""
    windows = model_windows(path)
    exact: Scores | None = None
    found = []
    task = progress.add_task(path.name, total=len(settings))
    for setting in settings:
        quantization, kv_cache_dtype = setting
        progress.update(task, description=f"{path.name}: {quantization} weights, {kv_cache_dtype} cache")
        flags = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": "1"}
        try:
            model = ServedModel(path, {**flags, "max_num_batched_tokens": str(WINDOW), "max_model_len": str(WINDOW)})
        except UnservableSettings as error:  # as of a type of cache that these kernels do not read
            progress.console.print(f"Left out: {error}")
            continue
        finally:
            progress.advance(task)
        scores = score(model, windows)
        del model
        gc.collect()  # two models at once would not fit everywhere
        exact = exact or scores
        found.append(compare(setting, windows, scores, exact))
    return found


def print_qualities(console: Console, model: str, qualities: Sequence[Quality]) -> None:
    """One line per setting."""
    headings = ("weights", "KV cache", "perplexity", "to float32", *WINDOWS, "same likeliest token")
    table = Table(*headings, title=f"{model}, {qualities[0].num_tokens:,} tokens")
    for quality in qualities:
        table.add_row(
            quality.quantization,
            quality.kv_cache_dtype,
            f"{quality.perplexity:.3f}",
            f"{quality.ratio:.4f} ± {quality.ratio_error:.4f}",
            *(f"{quality.ratio_by_kind[kind]:.4f}" for kind in WINDOWS),
            f"{quality.agreement:.2%}",
        )
    console.print(table)


def main() -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="Perplexity and agreement of quantised models against float32.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--quantization", nargs="+", default=list(QUANTIZATIONS), help="kinds of weights to compare")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=list(CACHE_DTYPES), help="types of KV cache to compare")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, help="folder for the result")
    options = parser.parse_args()
    console = Console(stderr=True)
    facts = machine_facts()
    combinations = [(weights, cache) for weights in options.quantization for cache in options.kv_cache_dtype]
    settings = list(dict.fromkeys([EXACT, *combinations, DEFAULT]))
    qualities: dict[str, list[Quality]] = {}
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for name in options.models:
            path = resolve(name)
            qualities[path.name] = measure(path, settings, progress)
    for name, of_model in qualities.items():
        print_qualities(console, name, of_model)
    result = {
        "question": "perplexity and the likeliest token with quantised weights and KV caches, against float32",
        "command": command_line(),
        "machine": facts,
        "window_tokens": WINDOW,
        "windows": WINDOWS,
        "models": {name: [asdict(quality) for quality in of_model] for name, of_model in qualities.items()},
    }
    write_result(options.results / "quality.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
