"""What the steps of a model take, and what each part of them takes alone: products, head, attention, sampling, host.

Parts are measured apart from the step, over the same weights and as many bytes of cache; what they do not explain is
the rest: norms, gates, and whatever lies between them. Knows no limits of the machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np
import torch

from benchmarks import host_step_cost
from benchmarks.served_model import ServedModel
from kernels.attention.backend import select_backend
from kernels.attention.metadata import AttentionMetadata, Rotation
from kernels.quantized_weight import QuantizedWeight
from kernels.sampling.sampling_batch import SamplingBatch
from models.layers import Linear
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step whose rows are all alike."""

    num_sequences: int
    context: int  # tokens of each that are in the cache once the step has run
    num_new: int  # of these, tokens that the step computes

    @property
    def num_tokens(self) -> int:
        """That the step computes."""
        return self.num_sequences * self.num_new


@dataclass(frozen=True, slots=True)
class StepParts:
    """Median seconds."""

    step: float  # all of it: scheduling, execution and update
    products: float  # of the layers
    head: float  # of the rows that sample
    attention: float  # with the rotation, and the write of keys and values
    sampling: float
    host: float  # scheduling, inputs and results

    @property
    def rest(self) -> float:
        """What the parts leave of the step; negative where they are slower alone than within it."""
        return self.step - sum(getattr(self, field.name) for field in fields(self) if field.name != "step")


def measure_parts(model: ServedModel, shape: StepShape, text: Sequence[int], rounds: int) -> StepParts:
    """The steps of that shape in the real engine, then their parts alone. `text` is where prompts are cut from."""
    decoder = model.decoder
    steps = timed_steps(model, shape, text, rounds)
    linears = layer_products(model)
    inputs = {size: torch.randn(shape.num_tokens, size) for size in {in_features(linear) for linear in linears}}
    hidden = torch.randn(shape.num_sequences, decoder.config.hidden_size)
    logits = decoder.logits(hidden)
    sampling = _sampling(shape.num_sequences)
    return StepParts(
        step=median(steps),
        products=timed(lambda: [linear(inputs[in_features(linear)]) for linear in linears], rounds),
        head=timed(lambda: decoder.logits(hidden), rounds),
        attention=timed(_attention(model, shape), rounds),
        sampling=timed(lambda: decoder.ops.sample(logits, sampling), rounds),
        host=host_step_cost.measure(shape.num_sequences, shape.context, num_steps=20 * rounds).total,
    )


def timed_steps(model: ServedModel, shape: StepShape, text: Sequence[int], rounds: int) -> list[float]:
    """Seconds of at least `rounds` steps of that shape, as the scheduler comes to them.

    Raises:
        ValueError: it does not, with the settings of this model.
    """
    places = np.random.default_rng(0).permutation(len(text) - shape.context)
    prompts = [text[place : place + shape.context] for place in places[: max(rounds + 1, shape.num_sequences)]]
    if shape.num_new == 1:
        # Of these steps the middle one has the context that was asked for.
        prompts = [prompt[: shape.context - rounds] for prompt in prompts[: shape.num_sequences]]
        steps = model.generate(prompts, 2 * rounds + 1)
    else:  # one that warms up, and then as many as there are rounds
        steps = [step for prompt in prompts[: rounds + 1] for step in model.generate([prompt], 1)][1:]
    wanted = (shape.num_sequences, shape.num_tokens)
    seconds = [step.seconds for step in steps if (step.num_rows, step.num_tokens) == wanted]
    if len(seconds) < rounds:
        raise ValueError(f"the scheduler makes no steps of {wanted[0]} rows and {wanted[1]} tokens with these settings")
    return seconds


def layer_products(model: ServedModel) -> list[Linear]:
    """The products of all layers, in their order."""
    return [module for layer in model.decoder.layers for module in layer.modules() if isinstance(module, Linear)]


def in_features(linear: Linear) -> int:
    """Columns of its weight."""
    weight = linear.weight
    return weight.in_features if isinstance(weight, QuantizedWeight) else weight.shape[1]


def weight_bytes(linear: Linear) -> int:
    """Bytes of its weight that a product reads."""
    weight = linear.weight
    return weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes


def timed(action: Callable[[], object], rounds: int) -> float:
    """Median seconds, after one more run that warms up."""
    found = []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            action()
            found.append(time.perf_counter() - begin)
    return median(found[1:])


def _attention(model: ServedModel, shape: StepShape) -> Callable[[], None]:
    """Rotation, cache write and attention of every layer, over a cache of its own filled with noise."""
    decoder, info = model.decoder, model.info
    config = decoder.config
    backend = select_backend(model.config.attention_backend, decoder.device)
    num_blocks = -(-shape.context // info.block_size)
    spec = KVCacheSpec(len(config.layers), config.num_kv_heads, config.head_dim, info.block_size, info.dtype)
    kv_cache = KVCache(spec, shape.num_sequences * num_blocks, decoder.device)
    # In a server that has run for a while the blocks of a sequence lie anywhere.
    tables = np.random.default_rng(0).permutation(shape.num_sequences * num_blocks).reshape(shape.num_sequences, -1)
    positions = np.arange(shape.context - shape.num_new, shape.context)
    slots = tables[:, positions // info.block_size] * info.block_size + positions % info.block_size
    starts = np.arange(0, shape.num_tokens + 1, shape.num_new, dtype=np.int32)
    seq_lens = np.full(shape.num_sequences, shape.context, np.int32)
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=torch.from_numpy(tables.astype(np.int32)),
        slot_mapping=torch.from_numpy(slots.ravel()),
        host_query_start_loc=starts,
        host_seq_lens=seq_lens,
    )
    heads = torch.randn(shape.num_tokens, config.num_q_heads + 2 * config.num_kv_heads, config.head_dim)
    angles = torch.rand(shape.num_tokens, config.head_dim // 2) * 6.28
    rotation = Rotation(angles.cos(), angles.sin())
    _fill(kv_cache)

    def attend() -> None:
        for layer, kv_layer in zip(decoder.layers, kv_cache.layers, strict=True):
            query = backend.rotate_and_write(heads, rotation, kv_layer, metadata)
            backend.attend(query, kv_layer, metadata, layer.attention.params)

    return attend


def _fill(kv_cache: KVCache) -> None:
    for layer in kv_cache.layers:
        for values, scales in ((layer.key, layer.key_scale), (layer.value, layer.value_scale)):
            noise = torch.randn(values.shape)
            if scales is None:
                values.copy_(noise)
            else:
                values.copy_((noise * 30).clamp(-127, 127))
                scales.fill_(1 / 30)


def _sampling(num_rows: int) -> SamplingBatch:
    """At a temperature of 1, as most requests are."""
    return SamplingBatch(
        temperature=torch.ones(num_rows),
        top_k=torch.zeros(num_rows, dtype=torch.int64),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        uniform=torch.rand(num_rows, dtype=torch.float64),
        all_greedy=False,
    )
