"""The decoder: token ids to logits, one class for all families, driven by ModelConfig.

Keys and values go through the attention backend it is handed; it holds no cache and keeps nothing between calls.
Must not know requests, sampling or file formats.
"""

import torch
from torch import nn

from kernels.attention.backend import AttentionBackend
from kernels.attention.cpu import CpuBackend
from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer
from kernels.model_ops.native_layers import NativeLayers
from kernels.model_ops.ops import ModelOps
from kernels.quantized_weight import QuantizedWeight
from models.config import LayerConfig, ModelConfig
from models.forward_batch import ForwardBatch
from models.layers import MLP, Attention, FusedWeight, Linear, RMSNorm, Slots, WeightSlot, frozen_parameter
from models.rope import RotaryEmbedding


class DecoderLayer(nn.Module):
    """Attention and MLP, each around a residual; with `sandwich_norms` their outputs are normed as well."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device, ops: ModelOps
    ) -> None:
        """Build with uninitialised weights."""
        super().__init__()
        params = AttentionParams(config.attention_scale, layer.sliding_window, config.attn_logit_softcap)
        self.attention = Attention(config, params, dtype, device, ops)
        self.mlp = MLP(config, dtype, device, ops)
        self.attention_norm = _hidden_norm(config, device, ops)
        self.mlp_norm = _hidden_norm(config, device, ops)
        self.attention_output_norm = _hidden_norm(config, device, ops) if config.sandwich_norms else nn.Identity()
        self.mlp_output_norm = _hidden_norm(config, device, ops) if config.sandwich_norms else nn.Identity()

    def forward(
        self,
        delta: torch.Tensor | None,  # [num_tokens, hidden_size], what the layer before adds; None = no layer before
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        angles: tuple[torch.Tensor, torch.Tensor],  # [num_tokens, head_dim / 2] float32 each
        backend: AttentionBackend,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # the delta and the residual of the next layer
        """One layer. Its last sum is left to the next norm, which adds and norms in one pass over memory."""
        if delta is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(delta, residual)
        attended = self.attention_output_norm(self.attention(normed, angles, backend, kv_layer, metadata))
        normed, residual = self.mlp_norm.add(attended, residual)
        return self.mlp_output_norm(self.mlp(normed)), residual

    def slots(self, prefix: str) -> Slots:
        """The slots of all weights of the layer. The same norm has another name where there are four."""
        slots = self.attention.slots(f"{prefix}.self_attn") | self.mlp.slots(f"{prefix}.mlp")
        slots |= self.attention_norm.slots(f"{prefix}.input_layernorm")
        if isinstance(self.attention_output_norm, RMSNorm) and isinstance(self.mlp_output_norm, RMSNorm):
            slots |= self.attention_output_norm.slots(f"{prefix}.post_attention_layernorm")
            slots |= self.mlp_norm.slots(f"{prefix}.pre_feedforward_layernorm")
            return slots | self.mlp_output_norm.slots(f"{prefix}.post_feedforward_layernorm")
        return slots | self.mlp_norm.slots(f"{prefix}.post_attention_layernorm")

    def fused_weights(self, prefix: str) -> list[FusedWeight]:
        """All matrices of the layer."""
        return self.attention.fused_weights(f"{prefix}.self_attn") + self.mlp.fused_weights(f"{prefix}.mlp")


class Decoder(nn.Module):
    """A decoder-only transformer with uninitialised weights; `models.loader.load_model` fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: ModelOps) -> None:
        """Allocate the weights in `dtype` (norms in float32) on `device`, to be computed with `ops`."""
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = device
        embedding = frozen_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.embedding: nn.Parameter | QuantizedWeight = embedding
        # Trained with the scale in the model's own precision: sqrt(640) is 25.25 in bfloat16.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype, device, ops) for layer in config.layers)
        self.ops = ops
        self.norm = _hidden_norm(config, device, ops)
        tied = embedding if config.tie_word_embeddings else None
        self.head = Linear(config.hidden_size, [config.vocab_size], False, dtype, device, ops, tied)
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))  # one or two
        self.rotary = [RotaryEmbedding(rope, config.head_dim, device) for rope in ropes]
        self.rope_of_layer = [ropes.index(layer.rope) for layer in config.layers]
        self.native_layers: NativeLayers | None = None  # where the layers run in one native call

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        kv_layers: list[KVLayer],
        wanted: torch.Tensor | None = None,  # [num_wanted] int64, ascending
    ) -> torch.Tensor:
        """Run all layers over the batch's tokens and write their keys and values.

        Returns:
            The normed hidden states, [num_tokens, hidden_size]. Rows of tokens that are not `wanted` may be arbitrary.
        """
        residual = self.ops.embed(batch.input_ids, self.embedding, self.embedding_scale)
        angles = [rotary.angles(batch.positions, self.ops) for rotary in self.rotary]
        if self.native_layers is not None and isinstance(backend, CpuBackend):
            return self.native_layers.run(residual, angles, backend, kv_layers, batch.attn, wanted)
        delta = None
        for layer, kv_layer, rope in zip(self.layers, kv_layers, self.rope_of_layer, strict=True):
            delta, residual = layer(delta, residual, angles[rope], backend, kv_layer, batch.attn)
        return self.norm.add(delta, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the rows that are asked for, [num_rows, hidden_size] to [num_rows, vocab_size] float32.

        They are put into `out` where one is given.
        """
        products = self.head(hidden)
        logits = products.float() if out is None else out.copy_(products)
        cap = self.config.final_logit_softcap
        if cap is None:
            return logits
        capped = self.ops.soft_cap(logits, cap)
        return capped if out is None else out.copy_(capped)

    def slots(self) -> Slots:
        """Every tensor that a checkpoint of this model must hold, by its Hugging Face name."""
        assert isinstance(self.embedding, nn.Parameter), "a quantised weight has no slots"
        slots = {"model.embed_tokens.weight": WeightSlot(tuple(self.embedding.shape), self.embedding)}
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}")
        slots |= self.norm.slots("model.norm")
        if not self.config.tie_word_embeddings:
            slots |= self.head.slots("lm_head")
        return slots

    def fused_weights(self) -> list[FusedWeight]:
        """Every matrix, with what lies in it."""
        vocabulary = (self.config.vocab_size, self.config.hidden_size)
        weights = [FusedWeight(("model.embed_tokens.weight",), vocabulary, self._quantize_embedding_to)]
        for index, layer in enumerate(self.layers):
            weights += layer.fused_weights(f"model.layers.{index}")
        if not self.config.tie_word_embeddings:
            weights.append(self.head.fused_weight("lm_head"))
        return weights

    def _quantize_embedding_to(self, weight: QuantizedWeight) -> None:
        del self.embedding
        self.embedding = weight
        if self.config.tie_word_embeddings:
            self.head.quantize_to(weight)


def _hidden_norm(config: ModelConfig, device: torch.device, ops: ModelOps) -> RMSNorm:
    return RMSNorm(
        config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_weight_offset, ops=ops, device=device
    )
