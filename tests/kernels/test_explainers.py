"""The worked examples of the usual explanations of attention and the KV cache, through every backend.

The numbers are computed here from the definitions with plain Python floats, not copied from the texts.
"""

import math

import pytest
import torch

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionParams, KVLayer
from tests.kernels.paged_batches import TOLERANCES, Shape, make_kv_layer, make_metadata, relative_error

TINY = Shape(num_q_heads=1, num_kv_heads=1, head_dim=2, block_size=2)
TINY_PARAMS = AttentionParams(scale=1 / math.sqrt(2))
TINY_BLOCK_IDS = [[3, 1]]

# "The cat sat": one row per token.
CAT_Q = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
CAT_K = [[1.0, 1.0], [0.0, 1.0], [1.0, 2.0]]
CAT_V = [[1.0, 0.0], [1.0, 2.0], [2.0, 2.0]]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores: list[float]) -> list[float]:
    exponentials = [math.exp(s) for s in scores]
    return [e / sum(exponentials) for e in exponentials]


def causal_row(token: int) -> list[float]:
    """Output of one token of "The cat sat", from the definition."""
    scores = [dot(CAT_Q[token], key) / math.sqrt(2) for key in CAT_K[: token + 1]]
    weights = softmax(scores)
    return [dot(weights, [value[d] for value in CAT_V[: token + 1]]) for d in range(2)]


def one_head(rows: list[list[float]]) -> torch.Tensor:  # [num_tokens, 1, 2]
    return torch.tensor(rows).unsqueeze(1)


def step(
    backend: AttentionBackend,
    kv_layer: KVLayer,
    begin: int,
    end: int,
    q: list[list[float]],
    k: list[list[float]],
    v: list[list[float]],
) -> torch.Tensor:  # [end - begin, 2]
    """Write and attend tokens `begin:end` of a one-head sequence."""
    metadata = make_metadata([end - begin], [end], TINY_BLOCK_IDS, TINY.block_size)
    backend.write_kv(one_head(k[begin:end]), one_head(v[begin:end]), kv_layer, metadata)
    return backend.attend(one_head(q[begin:end]), kv_layer, metadata, TINY_PARAMS).squeeze(1)


def test_the_cat_sat_on_paper() -> None:
    raw_scores = [dot(CAT_Q[2], key) for key in CAT_K]
    assert raw_scores == [2.0, 1.0, 3.0]
    weights = softmax([s / math.sqrt(2) for s in raw_scores])
    assert weights == pytest.approx([0.28, 0.14, 0.58], abs=0.005)
    # The text's output is that of the rounded weights.
    assert [dot([0.28, 0.14, 0.58], column) for column in ([1, 1, 2], [0, 2, 2])] == pytest.approx([1.58, 1.44])
    assert causal_row(2) == pytest.approx([1.58, 1.44], abs=0.01)


def test_the_cat_sat_in_one_prefill(every_backend: AttentionBackend) -> None:
    out = step(every_backend, make_kv_layer(TINY, 5), 0, 3, CAT_Q, CAT_K, CAT_V)
    expected = torch.tensor([causal_row(token) for token in range(3)], dtype=torch.float64)
    assert relative_error(out, expected) < TOLERANCES[torch.float32]


def test_the_cat_sat_token_by_token(every_backend: AttentionBackend) -> None:
    kv_layer = make_kv_layer(TINY, 5)
    decoded = [step(every_backend, kv_layer, t, t + 1, CAT_Q, CAT_K, CAT_V) for t in range(3)]
    prefilled = step(every_backend, make_kv_layer(TINY, 5), 0, 3, CAT_Q, CAT_K, CAT_V)
    torch.testing.assert_close(torch.cat(decoded), prefilled, rtol=1e-6, atol=1e-6)


def test_the_row_of_bank(every_backend: AttentionBackend) -> None:
    """The row of "bank" in "muddy river bank", of which the text gives q, one key and the weights.

    The other two keys are made to fit: with weight w_i the score is s_i = s_muddy + ln(w_i / w_muddy), so the raw
    score is raw_muddy + sqrt(2) ln(w_i / w_muddy), and a key along q that has it is q * raw / |q|^2.
    """
    weights = {"muddy": 0.49, "river": 0.20, "bank": 0.31}
    q_bank, k_muddy = [-0.46, 0.94], [-0.47, 0.65]
    raw_muddy = dot(q_bank, k_muddy)
    assert raw_muddy == pytest.approx(0.83, abs=0.005)
    keys = {"muddy": k_muddy}
    for word in ("river", "bank"):
        raw = raw_muddy + math.sqrt(2) * math.log(weights[word] / weights["muddy"])
        keys[word] = [x * raw / dot(q_bank, q_bank) for x in q_bank]
    values = {"muddy": [0.0, 0.0], "river": [0.0, 1.0], "bank": [1.0, 0.0]}  # so that the output shows the weights

    words = ["muddy", "river", "bank"]
    q = [[0.0, 0.0], [0.0, 0.0], q_bank]
    out = step(every_backend, make_kv_layer(TINY, 5), 0, 3, q, [keys[w] for w in words], [values[w] for w in words])
    expected = torch.tensor([weights["bank"], weights["river"]], dtype=torch.float64)
    assert relative_error(out[2], expected) < TOLERANCES[torch.float32]


def test_multi_head_cache_grows_by_one_token(every_backend: AttentionBackend) -> None:
    """Two sequences of 5 tokens, width 384, 6 heads of 64: the sixth token adds one key per head."""
    batch_size, num_tokens, width, num_heads, head_dim = 2, 5, 384, 6, 64
    shape = Shape(num_heads, num_heads, head_dim, block_size=4)
    params = AttentionParams(scale=head_dim**-0.5)
    block_ids = [[5, 0], [2, 6]]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch_size, num_tokens + 1, width, generator=generator)
    w_q, w_k, w_v = (torch.randn(width, width, generator=generator) * width**-0.5 for _ in range(3))
    q, k, v = (  # [batch_size, num_heads, num_tokens + 1, head_dim]
        (x @ w).view(batch_size, -1, num_heads, head_dim).transpose(1, 2) for w in (w_q, w_k, w_v)
    )
    kv_layer = make_kv_layer(shape, 8)

    def tokens(projected: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The rows of one step: [batch_size * (end - begin), num_heads, head_dim]."""
        return projected[:, :, begin:end].transpose(1, 2).flatten(0, 1)

    def cached(cache: torch.Tensor, count: int) -> torch.Tensor:
        """Gathered from the blocks: [batch_size, num_heads, count, head_dim]."""
        return torch.stack([cache[ids].transpose(0, 1).flatten(1, 2)[:, :count] for ids in block_ids])

    prefill = make_metadata([num_tokens] * batch_size, [num_tokens] * batch_size, block_ids, shape.block_size)
    every_backend.write_kv(tokens(k, 0, 5), tokens(v, 0, 5), kv_layer, prefill)
    assert cached(kv_layer.key, 5).shape == (2, 6, 5, 64)
    assert torch.equal(cached(kv_layer.key, 5), k[:, :, :5])

    decode = make_metadata([1] * batch_size, [num_tokens + 1] * batch_size, block_ids, shape.block_size)
    every_backend.write_kv(tokens(k, 5, 6), tokens(v, 5, 6), kv_layer, decode)
    keys, values = cached(kv_layer.key, 6), cached(kv_layer.value, 6)
    assert keys.shape == values.shape == (2, 6, 6, 64)
    assert torch.equal(keys, k)
    assert torch.equal(values, v)

    scores = q[:, :, 5:].double() @ keys.double().transpose(2, 3) * params.scale
    assert scores.shape == (2, 6, 1, 6)
    dense = scores.softmax(dim=-1) @ values.double()  # [2, 6, 1, 64]
    out = every_backend.attend(tokens(q, 5, 6), kv_layer, decode, params)
    assert relative_error(out, dense.squeeze(2)) < TOLERANCES[torch.float32]
