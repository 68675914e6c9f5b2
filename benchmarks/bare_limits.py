"""What a processor shows without our code: bytes read per second, and matrix products by torch's own libraries.

Knows the shapes of a model's products, no weights and no engine.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from kernels.quantized_weight import QuantizedWeight, pack, quantize
from models.config import ModelConfig

# Weights are taken in turn from so many bytes of copies, as in a model: none is in a cache when its turn comes again.
_RING_BYTES = 96 << 20
_MOST_COPIES = 256
_VISIT_SECONDS = 0.02  # at least, of one measurement
_READ_BYTES = 1 << 28

Product = Callable[[torch.Tensor, Any], object]  # rows and a weight in its own form


@dataclass(frozen=True, slots=True)
class ProductShape:
    """One matrix of a model."""

    name: str
    in_features: int
    out_features: int
    count: int  # of such matrices in the model

    @property
    def num_weights(self) -> int:
        """Of all of them."""
        return self.in_features * self.out_features * self.count


@dataclass(frozen=True, slots=True)
class Way:
    """One way to multiply: how copies of a float weight are made in the form it takes, and the product with one."""

    name: str
    bits: int  # of a weight
    is_bare: bool  # by torch alone
    prepare: Callable[[torch.Tensor], Callable[[], Any]]
    multiply: Product


def product_shapes(config: ModelConfig) -> list[ProductShape]:
    """The products of a step: those of the layers, then the head."""
    layers, hidden, size = len(config.layers), config.hidden_size, config.intermediate_size
    heads = config.num_q_heads * config.head_dim
    return [
        ProductShape("q, k, v", hidden, heads + 2 * config.num_kv_heads * config.head_dim, layers),
        ProductShape("attention output", heads, hidden, layers),
        ProductShape("gate, up", hidden, 2 * size, layers),
        ProductShape("down", size, hidden, layers),
        ProductShape("head", hidden, config.vocab_size, 1),
    ]


def bare_ways() -> list[Way]:
    """Torch's products: float32, and int8 with rows rounded on the way where an engine of this build has it."""
    engines = [name for name in ("fbgemm", "onednn") if name in torch.backends.quantized.supported_engines]
    return [
        Way("float32", 32, True, lambda weight: weight.clone, functional.linear),
        *(Way(f"int8, {name}", 8, True, lambda w, n=name: _per_channel(w, n), _dynamic) for name in engines),
    ]


def own_ways(linear: Callable[[torch.Tensor, QuantizedWeight, None], torch.Tensor]) -> list[Way]:
    """The products of this project, by `linear`, with 8- and 4-bit weights."""

    def multiply(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        return linear(rows, weight, None)

    return [
        Way("own, 8 bit", 8, False, lambda weight: _copies(quantize(weight)), multiply),
        Way("own, 4 bit", 4, False, lambda weight: _copies(_four_bits(weight)), multiply),
    ]


def product_seconds(
    shape: ProductShape, numbers_of_rows: Sequence[int], ways: Sequence[Way], rounds: int
) -> dict[str, dict[int, float]]:
    """Median seconds of one product, each way in turn in every round: by the way's name and the number of rows."""
    weight = torch.randn(shape.out_features, shape.in_features) / shape.in_features**0.5
    rings = {way.name: _ring(way, weight) for way in ways}
    found: dict[str, dict[int, float]] = {way.name: {} for way in ways}
    for num_rows in numbers_of_rows:
        rows = torch.randn(num_rows, shape.in_features)
        visits: dict[str, list[float]] = {way.name: [] for way in ways}
        for number in range(rounds + 1):
            for way in ways:
                seconds = _visit(way, rows, rings[way.name])
                if number:  # the first round warms up
                    visits[way.name].append(seconds)
        for name, seconds_of_visits in visits.items():
            found[name][num_rows] = median(seconds_of_visits)
    return found


def _visit(way: Way, rows: torch.Tensor, ring: deque[Any]) -> float:
    """Seconds of one product, as the mean of as many as a visit takes."""
    count, begin = 0, time.perf_counter()
    while True:
        way.multiply(rows, ring[0])
        ring.rotate(-1)
        count += 1
        if (passed := time.perf_counter() - begin) >= _VISIT_SECONDS:
            return passed / count


def read_bandwidth(num_threads: int, rounds: int) -> float:
    """Bytes per second that so many threads read of memory that no cache holds; the best of several passes."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        values = torch.zeros(_READ_BYTES // 4)
        found = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            values.sum()
            found.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return values.nbytes / min(found)


def _ring(way: Way, weight: torch.Tensor) -> deque[Any]:
    count = min(_MOST_COPIES, max(2, _RING_BYTES * 8 // (weight.numel() * way.bits)))
    copy = way.prepare(weight)
    return deque(copy() for _ in range(count))


def _copies(weight: QuantizedWeight) -> Callable[[], QuantizedWeight]:
    minimums = weight.minimums
    return lambda: replace(
        weight,
        codes=weight.codes.clone(),
        scales=weight.scales.clone(),
        minimums=None if minimums is None else minimums.clone(),
    )


def _per_channel(weight: torch.Tensor, engine: str) -> Callable[[], Any]:
    scales = weight.abs().amax(dim=1).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its quantised tensors will go; the products take no other
        codes = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    return lambda: _packed(codes, engine)


def _packed(codes: torch.Tensor, engine: str) -> Any:  # noqa: ANN401  # an object of torch's own
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine  # of what is packed from now on
    try:
        return torch.ops.quantized.linear_prepack(codes, None)
    finally:
        torch.backends.quantized.engine = before


def _dynamic(rows: torch.Tensor, packed: Any) -> torch.Tensor:  # noqa: ANN401
    found: torch.Tensor = torch.ops.quantized.linear_dynamic(rows, packed)
    return found


def _four_bits(weight: torch.Tensor) -> QuantizedWeight:
    """Codes of 4 bits between each group's least and greatest value, as Q4_1 has them."""
    groups = weight.unflatten(1, (-1, 32))
    least, most = groups.amin(dim=-1), groups.amax(dim=-1)
    scales = (most - least) / 15
    codes = ((groups - least[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8)
    return pack(codes.flatten(1), scales, least)
