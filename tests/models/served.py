"""A toy decoder, and a scheduler and a runner over one pool that serve it, for tests of whole runs."""

from collections import deque

import torch

from kernels.attention.backend import select_backend
from kernels.model_ops.torch_ops import TorchOps
from models.config import LayerConfig, ModelConfig, RopeParams
from models.decoder import Decoder
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 96
CPU = torch.device("cpu")


def toy_decoder(ops=None):
    """Two layers of random weights, one of them with a window; its end token is 7."""
    rope = RopeParams(theta=10_000.0)
    config = ModelConfig(
        family="llama",
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_MODEL_LEN,
        layers=(LayerConfig(rope), LayerConfig(rope, sliding_window=12)),
        rms_norm_eps=1e-5,
        attention_scale=8**-0.5,
        eos_token_ids=(7,),
    )
    decoder = Decoder(config, torch.float32, CPU, ops or TorchOps())
    generator = torch.Generator().manual_seed(11)
    for parameter in decoder.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return decoder


class Served:
    """A scheduler and a runner over one pool, and everything they say about each sequence."""

    def __init__(
        self,
        model,
        backend="auto",
        num_blocks=200,
        block_size=4,
        kv_dtype="float32",
        num_host_blocks=0,
        enable_prefix_caching=True,
        **limits,
    ):
        spec = KVCacheSpec(2, 2, 8, block_size, kv_dtype)
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": 512, **limits}
        self.embeddings = {}  # of each request, in the order in which they came
        eos_token_ids = frozenset(model.config.eos_token_ids)
        self.scheduler = Scheduler(
            SchedulerConfig(max_model_len=MAX_MODEL_LEN, eos_token_ids=eos_token_ids, **limits),
            BlockManager(
                num_blocks,
                block_size,
                num_host_blocks=num_host_blocks,
                enable_prefix_caching=enable_prefix_caching,
            ),
        )
        self.runner = ModelRunner(
            model,
            select_backend(backend, CPU),
            KVCache(spec, num_blocks, CPU, num_host_blocks),
            max_num_seqs=limits["max_num_seqs"],
            max_model_len=MAX_MODEL_LEN,
        )

    def run(self, requests, num_steps_ahead=0):
        """Tokens, sampled log-probabilities and prompt scores of every (request id, index)."""
        for request_id, (prompt, params) in requests.items():
            self.scheduler.add(Request(request_id, tuple(prompt), params, 0.0))
        tokens, logprobs, scores = {}, {}, {}
        in_flight = deque()
        while self.scheduler.has_unfinished or in_flight:
            if self.scheduler.has_unfinished:
                output = self.scheduler.schedule()
                in_flight.append((output, self.runner.launch(output)))
                if len(in_flight) <= num_steps_ahead:
                    continue
            output, pending = in_flight.popleft()
            for update in self.scheduler.update(output, pending.result()):
                key = update.request_id, update.index
                tokens.setdefault(key, []).extend(update.token_ids)
                logprobs.setdefault(key, []).extend(update.logprobs)
                scores.setdefault(update.request_id, []).extend(update.prompt_logprobs)
                if update.embedding:
                    assert update.finish_reason == "stop"
                    self.embeddings.setdefault(update.request_id, []).append(update.embedding)
            self.scheduler.check_integrity()
        return tokens, logprobs, scores
