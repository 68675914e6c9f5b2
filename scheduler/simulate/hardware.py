"""What a step takes on a card that is not at hand, from its data sheet: a roofline, with the assumptions written out.

A step is a read of the weights or a product with them, whichever takes longer, and the same for attention with the
KV cache (Williams et al., CACM 2009). Knows no scheduler.
"""

from dataclasses import dataclass

from paged_cache.spec import KVCacheSpec
from scheduler.simulate.step_cost import StepWork


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator, as its maker describes it."""

    name: str
    memory_bytes: float
    bytes_per_second: float  # of its memory
    flops: float  # dense bfloat16 with float32 sums
    host_bytes_per_second: float  # to and from host memory, one way


# Data sheets: A100 80GB PCIe/SXM, L4, L40S, H100 SXM, H200 SXM, all dense.
CARDS = {
    card.name: card
    for card in (
        Card("l4", 24e9, 0.30e12, 121e12, 25e9),
        Card("l40s", 48e9, 0.864e12, 362e12, 25e9),
        Card("a100", 80e9, 2.04e12, 312e12, 25e9),
        Card("h100", 80e9, 3.35e12, 989e12, 50e9),
        Card("h200", 141e9, 4.8e12, 989e12, 50e9),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a decoder counts for its speed."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_param: int = 2

    @property
    def weight_bytes(self) -> float:
        """All weights, in the type that they are served in."""
        return self.num_params * self.bytes_per_param

    def kv_spec(self, block_size: int) -> KVCacheSpec:
        """The KV cache in bfloat16."""
        return KVCacheSpec(self.num_layers, self.num_kv_heads, self.head_dim, block_size, "bfloat16")


MODELS = {
    model.name: model
    for model in (
        ModelShape("smollm2-135m", 134.5e6, 30, 9, 3, 64),
        ModelShape("qwen2.5-7b", 7.62e9, 28, 28, 4, 128),
        ModelShape("llama-3.1-8b", 8.03e9, 32, 32, 8, 128),
        ModelShape("llama-2-13b", 13.0e9, 40, 40, 40, 128),
        ModelShape("llama-3.1-70b", 70.6e9, 80, 64, 8, 128),
    )
}


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """A model on one card, or on several that share its layers evenly; what they say to each other takes no time.

    The efficiencies are what is reached of the data sheet; good kernels reach about these.
    """

    card: Card
    model: ModelShape
    block_size: int
    num_cards: int = 1
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    host_seconds: float = 1e-3  # of a step that the device does not hide
    host_seconds_per_row: float = 5e-6

    def seconds(self, work: StepWork) -> float:
        """Of one step: linear layers, then attention, then whatever moves whole blocks."""
        model = self.model
        flops = self.card.flops * self.compute_efficiency * self.num_cards
        bandwidth = self.card.bytes_per_second * self.memory_efficiency * self.num_cards
        spec = model.kv_spec(self.block_size)
        linear = max(2 * model.num_params * work.num_tokens / flops, model.weight_bytes / bandwidth)
        # Two products of head_dim multiply-adds for each pair, head and layer.
        flops_per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
        attention = max(
            flops_per_pair * (work.num_attention_pairs + work.num_context_tokens) / flops,
            spec.bytes_per_token * work.num_context_tokens / bandwidth,
        )
        copied = 2 * work.num_copied_blocks * spec.bytes_per_block / bandwidth
        swapped = work.num_swapped_blocks * spec.bytes_per_block / (self.card.host_bytes_per_second * self.num_cards)
        host = self.host_seconds + self.host_seconds_per_row * work.num_rows
        return host + linear + attention + copied + swapped

    def num_blocks(self, utilization: float = 0.9) -> int:
        """Blocks that fit beside the weights in `utilization` of the memory; 0 or less if not even the weights do."""
        left = self.card.memory_bytes * self.num_cards * utilization - self.model.weight_bytes
        return self.model.kv_spec(self.block_size).num_blocks_in(int(left))

    @property
    def seconds_per_prefill_token(self) -> float:
        """What one token of a long prefill costs: what recomputing it would."""
        flops = self.card.flops * self.compute_efficiency * self.num_cards
        return 2 * self.model.num_params / flops

    @property
    def seconds_per_swapped_block(self) -> float:
        """One way."""
        spec = self.model.kv_spec(self.block_size)
        return spec.bytes_per_block / (self.card.host_bytes_per_second * self.num_cards)

    def describe(self) -> str:
        """For the report."""
        return (
            f"roofline of {self.model.name} on {self.num_cards} x {self.card.name}: "
            f"{self.compute_efficiency:.0%} of {self.card.flops / 1e12:.0f} TFLOP/s, {self.memory_efficiency:.0%} of "
            f"{self.card.bytes_per_second / 1e12:.2f} TB/s, host {self.host_seconds * 1e3:g} ms a step and "
            f"{self.host_seconds_per_row * 1e6:g} us a row"
        )
