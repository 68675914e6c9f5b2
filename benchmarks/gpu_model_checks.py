"""Whether what surrounds attention is right on a card: the cache write, the decoder's operations, the engine's ways.

The other half of gpu_checks.py, which runs it.
"""

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu_batches import Heads, random_layer
from benchmarks.gpu_part import Part, Values
from benchmarks.gpu_serving import Engine, Served, Way, build_engine, can_capture, make_graphs, serve
from benchmarks.gpu_workload import llama_config
from kernels.attention.metadata import KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from kernels.attention.triton_write import launch_rotate_and_write
from kernels.kv_quant import dequantise, quantise
from kernels.model_ops.ops import ModelOps
from kernels.model_ops.torch_ops import TorchOps
from kernels.model_ops.triton_ops import TritonOps
from kernels.sampling.logit_edits import LogitEdits, Penalties, apply_edits
from kernels.sampling.sampling_batch import SamplingBatch
from tests.kernels.paged_batches import TOLERANCES, relative_error

BLOCK_SIZE = 16
ALLOWED_QUANTISED = 1e-2  # one step of the quantisation where a rounding falls the other way
ALLOWED_EDITED = 1e-5  # of logits near 10, rounded once or twice
SCORED = {"temperature": 0.0, "logprobs": 0}


def measure(part: Part) -> None:
    """All checks of the model's side."""
    for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        part.check(f"rotate and write, {dtype} cache", lambda d=dtype: _rotate_and_write(part, d))
    for batch_invariant in (False, True):
        name = "operations, batch-invariant" if batch_invariant else "operations"
        part.check(name, lambda flag=batch_invariant: _operations(part, TritonOps(batch_invariant=flag)))
    part.check("rows alone and in a batch, bitwise", lambda: _rows_alone(part))
    part.check("sampled tokens against torch", lambda: _sampler(part))
    part.check("edited logits against the host", lambda: _edits(part))
    if can_capture():
        part.check("graphs and overlap give the same tokens", lambda: _ways(part))
    part.check("requests alone and together, bitwise", lambda: _requests_alone(part))


def _rotate_and_write(part: Part, dtype: str) -> tuple[bool, Values]:
    """The fused kernel against norm, rotation, quantisation and scatter in torch."""
    heads, num_tokens = (Heads(4, 2, 16), 5) if part.is_small else (Heads(), 1000)
    device, half = part.device, heads.head_dim // 2
    packed = torch.randn(
        num_tokens, heads.num_q_heads + 2 * heads.num_kv_heads, heads.head_dim, device=device, dtype=torch.bfloat16
    )
    angles = torch.rand(num_tokens, half, device=device) * 6.28
    weight = torch.rand(heads.num_q_heads + heads.num_kv_heads, heads.head_dim, device=device) + 0.5
    rotation = Rotation(angles.cos(), angles.sin(), weight, 1e-6)
    num_blocks = 2 * -(-num_tokens // BLOCK_SIZE)
    layer = random_layer(heads, num_blocks, BLOCK_SIZE, device, dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
    slots[0] = -1
    before = tuple(x.clone() for x in _stored(layer))
    query = launch_rotate_and_write(packed, rotation, layer, slots)
    expected_query, key, value = rotate_heads(packed, rotation, heads.num_kv_heads)
    worst, untouched = relative_error(query, expected_query.double()), True
    for old, now, rows in zip(before, _stored(layer), (key, value), strict=True):
        blocks, offsets = slots[1:] // BLOCK_SIZE, slots[1:] % BLOCK_SIZE
        written = rows[1:].float()
        if layer.key_scale is not None:
            written = dequantise(*quantise(written, layer.key.dtype))
        worst = max(worst, relative_error(now[blocks, :, offsets], written.double()))
        now[blocks, :, offsets] = old[blocks, :, offsets]
        untouched &= torch.equal(now, old)
    allowed = TOLERANCES[torch.bfloat16] if layer.key_scale is None else ALLOWED_QUANTISED
    return worst < allowed and untouched, {"bfloat16_error": worst, "only_its_slots": untouched}


def _stored(layer: KVLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as numbers, [num_blocks, num_kv_heads, block_size, head_dim] float32."""
    if layer.key_scale is None or layer.value_scale is None:
        return layer.key.float(), layer.value.float()
    return dequantise(layer.key, layer.key_scale), dequantise(layer.value, layer.value_scale)


def _operations(part: Part, ops: ModelOps) -> tuple[bool, Values]:
    """Each against torch in float64: the worst error of all dtypes, as a share of what is allowed."""
    worst: dict[str, float] = {}
    for dtype, allowed in TOLERANCES.items():
        for name, error in _operation_errors(part, ops, dtype).items():
            # A float32 sum of thousands of products rounds more often than attention's.
            share = error / (10 * allowed if name == "linear" and dtype == torch.float32 else allowed)
            worst[name] = max(worst.get(name, 0.0), share)
    return all(share < 1 for share in worst.values()), {f"{name}_share": share for name, share in worst.items()}


def _operation_errors(part: Part, ops: ModelOps, dtype: torch.dtype) -> dict[str, float]:
    tokens, hidden, out = (3, 48, 20) if part.is_small else (300, 4096, 6144)
    x, residual = torch.randn(2, tokens, hidden, device=part.device).to(dtype)
    matrix = (torch.randn(out, hidden, device=part.device) * hidden**-0.5).to(dtype)
    weight = torch.rand(hidden, device=part.device) + 0.5
    scores = 30 * torch.randn(tokens, hidden, device=part.device)

    def call_all(ops: ModelOps, wide: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            "linear": ops.linear(wide(x), wide(matrix), None),
            "norm": ops.rms_norm(wide(x), wide(weight), 1e-5),
            "add_norm": torch.cat(ops.add_rms_norm(wide(x), wide(residual), wide(weight), 1e-5)),
            "silu": ops.gate(wide(x), "silu"),
            "gelu": ops.gate(wide(x), "gelu_tanh"),
            "soft_cap": ops.soft_cap(wide(scores), 20.0),
        }

    expected = call_all(TorchOps(), torch.Tensor.double)
    return {name: relative_error(out, expected[name]) for name, out in call_all(ops, lambda tensor: tensor).items()}


def _rows_alone(part: Part) -> tuple[bool, Values]:
    """The batch-invariant operations give a row the same bits alone, among few and among many."""
    tokens, hidden, out = (5, 48, 20) if part.is_small else (300, 4096, 6144)
    ops = TritonOps(batch_invariant=True)
    x = torch.randn(tokens, hidden, device=part.device, dtype=torch.bfloat16)
    matrix = torch.randn(out, hidden, device=part.device, dtype=torch.bfloat16)
    weight = torch.rand(hidden, device=part.device)
    wrong = 0
    for call in (
        lambda rows: ops.linear(rows, matrix, None),
        lambda rows: ops.rms_norm(rows, weight, 1e-5),
        lambda rows: ops.gate(rows, "silu"),
    ):
        together = call(x)
        for start, end in ((0, 1), (2, 3), (1, 5), (tokens // 2, tokens)):
            wrong += not torch.equal(call(x[start:end]), together[start:end])
    return wrong == 0, {"different": wrong}


def _sampler(part: Part) -> tuple[bool, Values]:
    """Tokens drawn from the same numbers; rounding may move a draw that falls on an edge, one in thousands."""
    rows, vocab = (4, 100) if part.is_small else (256, 128_256)
    device = part.device
    logits = 3 * torch.randn(rows, vocab, device=device)
    kind = torch.arange(rows, device=device) % 4
    batch = SamplingBatch(
        temperature=torch.where(kind == 0, 0.0, 0.8).float(),
        top_k=torch.where(kind == 1, 50, 0),
        top_p=torch.where(kind == 2, 0.9, 1.0).float(),
        min_p=torch.where(kind == 3, 0.05, 0.0).float(),
        uniform=torch.rand(rows, device=device, dtype=torch.float64),
        all_greedy=False,
    )
    different = TritonOps(batch_invariant=False).sample(logits, batch) != TorchOps().sample(logits, batch)
    num_different = int(different.sum())
    return num_different <= rows // 100, {"different": num_different, "rows": rows}


def _edits(part: Part) -> tuple[bool, Values]:
    """Biases, penalties and masks of every row, on the card and on the host: the same tokens, near numbers."""
    rows, vocab, occurred = (4, 100, 9) if part.is_small else (64, 128_256, 3000)
    logits = 3 * torch.randn(rows, vocab)
    each_row = torch.arange(rows)
    token_ids = torch.stack([torch.randperm(vocab)[:occurred] for _ in range(rows)])
    num_occurred = torch.randint(1, occurred + 1, (rows,))
    counts = torch.randint(4, token_ids.shape, dtype=torch.int32)
    host = (
        *(each_row, token_ids[:, 0], torch.randn(rows)),
        *(each_row, torch.rand(rows) + 0.5, torch.randn(rows), torch.randn(rows), each_row.flip(0), num_occurred),
        *(token_ids.int(), counts),
        *(each_row, token_ids[:, 1]),
        *(each_row, torch.randint(256, (rows, 4 * -(-vocab // 32)), dtype=torch.uint8)),
    )

    def edited(device: torch.device) -> torch.Tensor:
        tensors = [tensor.to(device) for tensor in host]
        result = logits.to(device, copy=True)
        penalties = Penalties(*tensors[3:9], num_occurred.numpy(), *tensors[9:11])
        apply_edits(result, LogitEdits(*tensors[:3], penalties, *tensors[11:]))
        return result.cpu()

    expected, got = edited(torch.device("cpu")), edited(part.device)
    forbidden = expected.isinf()
    worst = float((got - expected)[~forbidden].abs().max())
    return torch.equal(got.isinf(), forbidden) and worst < ALLOWED_EDITED, {"worst": worst}


def _ways(part: Part) -> tuple[bool, Values]:
    """A small decoder in float32, requests of many lengths: every way of stepping gives the same tokens."""
    engine = _small_engine(part, "float32", batch_invariant=False)
    prompts, max_tokens, batched = _requests(part)
    max_num_blocks = -(-(max(map(len, prompts)) + max_tokens) // BLOCK_SIZE)
    graphs = make_graphs(engine, [2, len(prompts) + 1], max_num_blocks)
    expected = _tokens(serve(engine, Way(None, False), prompts, max_tokens, batched, SCORED))
    different = {}
    for way in (Way(None, True), Way(graphs, False), Way(graphs, True)):
        served = _tokens(serve(engine, way, prompts, max_tokens, batched, SCORED))
        different[f"different_{way.name}"] = sum(a != b for a, b in zip(served, expected, strict=True))
    return not any(different.values()), different


def _requests_alone(part: Part) -> tuple[bool, Values]:
    """In batch-invariant mode tokens and their log-probabilities are the same alone and together."""
    engine = _small_engine(part, "bfloat16", batch_invariant=True)
    prompts, max_tokens, batched = _requests(part)
    together = serve(engine, Way(None, False), prompts, max_tokens, batched, SCORED)
    num_different = 0
    for i, prompt in enumerate(prompts):
        alone = serve(engine, Way(None, False), [prompt], max_tokens, batched, SCORED)
        num_different += alone.tokens["0"] != together.tokens[str(i)]
        num_different += alone.logprobs["0"] != together.logprobs[str(i)]
    return num_different == 0, {"different": num_different, "requests": len(prompts)}


def _small_engine(part: Part, dtype: str, *, batch_invariant: bool) -> Engine:
    sizes = (1, 32, 32, 1, 16, 64) if part.is_small else (3, 1024, 2048, 2, 128, 5000)
    names = ("num_layers", "hidden_size", "intermediate_size", "num_kv_heads", "head_dim", "vocab_size")
    config = llama_config(**dict(zip(names, sizes, strict=True)))
    return build_engine(config, dtype, 600, BLOCK_SIZE, part.device, part.synchronise, batch_invariant=batch_invariant)


def _requests(part: Part) -> tuple[list[list[int]], int, int]:
    """Prompts, tokens to generate, and tokens in one step: few enough that prompts go in chunks beside decodes."""
    rng = np.random.default_rng(3)
    lengths, vocab, max_tokens, batched = (
        ((4, 2), 64, 3, 4) if part.is_small else ((3, 700, 40, 130, 17), 5000, 24, 256)
    )
    return [rng.integers(0, vocab, length).tolist() for length in lengths], max_tokens, batched


def _tokens(served: Served) -> list[list[int]]:
    return list(served.tokens.values())
