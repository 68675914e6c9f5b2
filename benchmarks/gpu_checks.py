"""Whether the compiled kernels are right on this card: what the interpreter and the compiler alone cannot show.

Attention against float64, the same bits three times over, the same bits whatever the batch, graphs replayed with other
lengths; then gpu_model_checks.py. Part "checks" of benchmarks/gpu_check.sh, which also runs it under compute-sanitizer.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_model_checks
from benchmarks.gpu_batches import BLOCK_SIZE, Heads, Rows, make_batch, on_device, random_layer, random_query
from benchmarks.gpu_part import Part, Values, run_part
from benchmarks.gpu_serving import can_capture, make_recorder
from kernels.attention.backend import AttentionBackend, select_backend
from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer
from kernels.attention.reference import ReferenceBackend
from kernels.attention.triton_backend import TritonBackend
from kernels.kv_quant import dequantise
from tests.kernels.paged_batches import TOLERANCES, make_metadata, relative_error

REPEATS = 3
MIXED = Rows((1, 1, 1, 3, 8, 70, 200), (1, 1900, 640, 67, 2048, 1000, 200))
SMALL_MIXED = Rows((1, 1, 3, 9), (1, 70, 67, 20))
HEADS = (Heads(), Heads(8, 8, 64), Heads(14, 2, 64), Heads(9, 1, 80), Heads(8, 2, 96), Heads(8, 4, 256))
SMALL_HEADS = (Heads(6, 2, 16),)
BATCH_SIZES = (1, 2, 3, 8, 31, 64)
CHUNKS = (1, 7, 64, 333)


def measure(part: Part) -> None:
    """All checks; each counts as an error where it fails."""
    plain, invariant = (select_backend("triton", part.device, batch_invariant=flag) for flag in (False, True))
    backends = {
        "default": plain,
        "every tile split": TritonBackend(target_programs=1 << 20, min_split_keys=1),
        "batch-invariant": invariant,
    }
    for heads in SMALL_HEADS if part.is_small else HEADS:
        for name, backend in backends.items():
            part.check(f"{_text(heads)}, {name}", lambda h=heads, b=backend: _against_float64(part, h, b))
    for window, cap in ((33, None), (None, 5.0), (500, 30.0)):
        part.check(f"window {window}, cap {cap}", lambda w=window, c=cap: _special(part, plain, w, c))
    for dtype in ("int8", "float8_e4m3fn"):
        part.check(f"{dtype} cache", lambda d=dtype: _quantised(part, plain, d))
    for name, backend in backends.items():
        part.check(f"{REPEATS} repeats bitwise, {name}", lambda b=backend: _repeats(part, b))
    part.check("bitwise alone, in batches and in chunks", lambda: _invariance(part, invariant))
    if can_capture():
        part.check("graph replayed with other lengths", lambda: _graph(part, plain))
        part.check("batch-invariant graph, likewise", lambda: _graph(part, invariant))
    gpu_model_checks.measure(part)


def _against_float64(part: Part, heads: Heads, backend: AttentionBackend) -> tuple[bool, Values]:
    """The worst of the dtypes, as a share of what each is allowed."""
    rows = SMALL_MIXED if part.is_small else MIXED
    shares = {}
    for dtype, allowed in TOLERANCES.items():
        batch = make_batch(heads, rows, part.device, dtype=dtype)
        expected = ReferenceBackend().attend(batch.query.double(), batch.kv_layer, batch.metadata, heads.params)
        out = backend.attend(batch.query, batch.kv_layer, batch.metadata, heads.params)
        shares[f"{_text(dtype)}_error"] = error = relative_error(out, expected)
        if not error < allowed:  # NaN is wrong too
            return False, shares
    return True, shares


def _special(part: Part, backend: AttentionBackend, window: int | None, cap: float | None) -> tuple[bool, Values]:
    heads = SMALL_HEADS[0] if part.is_small else HEADS[0]
    batch = make_batch(heads, SMALL_MIXED if part.is_small else MIXED, part.device)
    params = AttentionParams(heads.head_dim**-0.5, window, cap)
    expected = ReferenceBackend().attend(batch.query.double(), batch.kv_layer, batch.metadata, params)
    error = relative_error(backend.attend(batch.query, batch.kv_layer, batch.metadata, params), expected)
    return error < TOLERANCES[torch.bfloat16], {"bfloat16_error": error}


def _quantised(part: Part, backend: AttentionBackend, dtype: str) -> tuple[bool, Values]:
    """Against float64 over the numbers that the quantised cache stands for."""
    heads = SMALL_HEADS[0] if part.is_small else HEADS[0]
    rows = SMALL_MIXED if part.is_small else MIXED
    batch = make_batch(heads, rows, part.device, cache_dtype=dtype)
    layer = batch.kv_layer
    assert layer.key_scale is not None and layer.value_scale is not None
    meant = KVLayer(dequantise(layer.key, layer.key_scale), dequantise(layer.value, layer.value_scale))
    expected = ReferenceBackend().attend(batch.query.double(), meant, batch.metadata, heads.params)
    error = relative_error(backend.attend(batch.query, layer, batch.metadata, heads.params), expected)
    return error < TOLERANCES[torch.bfloat16], {"bfloat16_error": error}


def _repeats(part: Part, backend: AttentionBackend) -> tuple[bool, Values]:
    heads = SMALL_HEADS[0] if part.is_small else HEADS[0]
    batch = make_batch(heads, SMALL_MIXED if part.is_small else MIXED, part.device)
    outs = [backend.attend(batch.query, batch.kv_layer, batch.metadata, heads.params) for _ in range(REPEATS)]
    num_different = sum(not torch.equal(out, outs[0]) for out in outs[1:])
    return num_different == 0, {"different": num_different}


class Pool:
    """Sequences whose keys and values are all in one cache: any of their tokens can attend, in any batch."""

    def __init__(self, heads: Heads, seq_lens: Sequence[int], device: torch.device) -> None:
        """Fill the cache and make a query for every token."""
        self.heads = heads
        self.seq_lens = list(seq_lens)
        num_blocks = [-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens]
        self.block_ids = [ids.tolist() for ids in torch.randperm(sum(num_blocks)).split(num_blocks)]
        self.layer = random_layer(heads, sum(num_blocks), BLOCK_SIZE, device, "bfloat16")
        self.queries = [random_query(heads, seq_len, torch.bfloat16, device) for seq_len in seq_lens]
        self._device = device

    def metadata(self, pieces: Sequence[tuple[int, int, int]]) -> AttentionMetadata:
        """A batch of (sequence, first token, token after the last), pieces of one token first."""
        made = make_metadata(
            [end - start for _, start, end in pieces],
            [end for _, _, end in pieces],
            [self.block_ids[seq][: -(-end // BLOCK_SIZE)] for seq, _, end in pieces],
            BLOCK_SIZE,
        )
        return on_device(made, self._device)

    def attend(self, backend: AttentionBackend, pieces: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """The output of each piece, [num_tokens, num_q_heads, head_dim]."""
        query = torch.cat([self.queries[seq][start:end] for seq, start, end in pieces])
        out = backend.attend(query, self.layer, self.metadata(pieces), self.heads.params)
        return list(out.split([end - start for _, start, end in pieces]))


def _invariance(part: Part, backend: AttentionBackend) -> tuple[bool, Values]:
    """Every token's output is what it is in a prefill of its sequence alone, to the bit."""
    longest = 40 if part.is_small else 3000
    num_seqs = 3 if part.is_small else max(BATCH_SIZES)
    seq_lens = np.random.default_rng(0).integers(1, longest, num_seqs).tolist()
    seq_lens[0] = longest  # cut into chunks below; after a hit in a prefix cache a sequence is the last of its chunks
    pool = Pool(SMALL_HEADS[0] if part.is_small else HEADS[0], seq_lens, part.device)
    alone = [pool.attend(backend, [(seq, 0, n)])[0] for seq, n in enumerate(seq_lens)]
    wrong: dict[str, int] = {}

    def compare(name: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        outs = pool.attend(backend, pieces)
        bad = sum(
            not torch.equal(out, alone[seq][start:end]) for out, (seq, start, end) in zip(outs, pieces, strict=True)
        )
        wrong[name] = wrong.get(name, 0) + bad

    last_tokens = [(seq, n - 1, n) for seq, n in enumerate(seq_lens)]
    for size in BATCH_SIZES:
        if size <= num_seqs:
            compare(f"{size}_decodes", last_tokens[:size])
    compare("decodes_and_a_prefill", [*last_tokens[1:], (0, 0, longest)])
    for chunk in CHUNKS:
        starts = range(0, longest, chunk)
        for start in starts[-4 if part.is_small else -25 :]:
            compare(f"chunks_of_{chunk}", [(0, start, min(start + chunk, longest))])
    return not any(wrong.values()), {"compared": len(wrong), **{name: bad for name, bad in wrong.items() if bad}}


def _graph(part: Part, backend: AttentionBackend) -> tuple[bool, Values]:
    """One recording, replayed with lengths from padding to the longest, against the same rows run as they are."""
    num_rows, longest = (3, 64) if part.is_small else (16, 5000)
    pool = Pool(SMALL_HEADS[0] if part.is_small else HEADS[0], [longest] * num_rows, part.device)
    heads, graph_backend = pool.heads, backend.for_graph(num_rows)
    full = pool.metadata([(row, longest - 1, longest) for row in range(num_rows)])
    query = random_query(heads, num_rows, torch.bfloat16, part.device)
    out = torch.empty_like(query)
    starts = np.arange(num_rows + 1, dtype=np.int32)
    graph_backend.refill(starts, np.zeros(num_rows, dtype=np.int32))

    def work() -> None:
        out.copy_(graph_backend.attend(query, pool.layer, full, heads.params))

    recorded = make_recorder(part.device).record(work)
    errors, num_different = [], 0
    rng = np.random.default_rng(1)
    for seq_lens in ([longest] * num_rows, [1] * num_rows, [0] * (num_rows - 1) + [longest], None, None, None):
        lengths = np.array(rng.integers(0, longest + 1, num_rows) if seq_lens is None else seq_lens, dtype=np.int32)
        query.copy_(random_query(heads, num_rows, torch.bfloat16, part.device))
        metadata = dataclasses.replace(
            full,
            seq_lens=torch.from_numpy(lengths).to(part.device),
            host_seq_lens=lengths,
        )
        graph_backend.refill(starts, lengths)
        out.fill_(torch.nan)
        recorded.replay()
        expected = ReferenceBackend().attend(query.double(), pool.layer, metadata, heads.params)
        errors.append(relative_error(out, expected))
        num_different += not torch.equal(out, backend.attend(query, pool.layer, metadata, heads.params))
    is_right = max(errors) < TOLERANCES[torch.bfloat16]
    return is_right, {"replays": len(errors), "bfloat16_error": max(errors), "not_bitwise_eager": num_different}


def _text(thing: Heads | torch.dtype) -> str:
    if isinstance(thing, Heads):
        return f"heads {thing.num_q_heads}/{thing.num_kv_heads} of {thing.head_dim}"
    return str(thing).removeprefix("torch.")


def main(argv: list[str] | None = None) -> int:
    """Run the part."""
    return run_part("checks", "Whether the compiled kernels are right on this card.", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
