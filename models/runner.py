"""One step on the device: a SchedulerOutput in, a StepResult out, and between the two a step that runs.

Rows -> block copies -> ForwardBatch -> decoder -> logits -> sampler. Holds the model, the cache and the rows of the
sequences that run; takes no decisions: what runs, and in which blocks, is the scheduler's.
"""

import torch

from kernels.attention.backend import AttentionBackend
from kernels.sampling.logit_edits import FORBIDDEN, apply_edits
from models.candidates import launch_candidates
from models.cuda_graphs import CudaGraphs
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.pooling import Pooler
from models.row_table import RowTable
from models.step_edits import StepEditor
from models.step_inputs import (
    ScoredPrompt,
    StepInputs,
    StepRows,
    block_pairs,
    build_inputs,
    scored_prompts,
    take_rows,
)
from models.step_outputs import PendingStep, PromptScores, SampledTokens, TokenScores, to_host
from paged_cache.kv_cache import KVCache
from scheduler.output import SchedulerOutput, StepResult

# Prompt tokens are scored this many at a time: the logits of a long prompt at once would not fit in memory.
_SCORED_ROWS_AT_ONCE = 64


class ModelRunner:
    """Executes steps of one model over one KV cache, in the order in which they are launched."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        graphs: CudaGraphs | None = None,
    ) -> None:
        """Keep up to `max_num_seqs` sequences of up to `max_model_len` tokens.

        Args:
            model: with its weights loaded.
            backend: attention over `kv_cache`.
            kv_cache: of that model; no other runner may write to it while this one is in use.
            max_num_seqs: sequences that are held at once.
            max_model_len: tokens of one sequence.
            graphs: of the same model, backend and cache, captured; None = every step is launched kernel by kernel.
        """
        self._model = model
        self._backend = backend
        self._kv_cache = kv_cache
        self._graphs = graphs
        self._table = RowTable(max_num_seqs, max_model_len, kv_cache.spec.block_size, model.config.eos_token_ids)
        self._editor = StepEditor(max_num_seqs, model.config.vocab_size, model.device)
        self._pooler = Pooler()
        # The last token that each row sampled stays on the device: the next step reads it there.
        self._last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)

    @property
    def model(self) -> Decoder:
        """What it runs, to be read only."""
        return self._model

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute every row's new tokens, and sample where a row's known tokens are all computed.

        Returns:
            One result per row, in the order of `output.rows`.
        """
        return self.launch(output).result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Begin a step. On a GPU nothing here waits for the device, so the result of the last step may be open still.

        A token that the last step samples counts as known: its id is read on the device.
        """
        if output.swapped_out:  # before anything is written to blocks that are free by now
            self._kv_cache.swap_out(block_pairs(output.swapped_out))
        self._table.forget(output.finished_seq_ids)
        if not output.rows:
            self._swap_in(output)
            return PendingStep(0, self._model.device)
        step = take_rows(self._table, output)
        scored = scored_prompts(self._table, step)
        inputs = build_inputs(self._table, step, output, scored, self._last_token_ids, self._editor)
        if output.block_copies:
            self._kv_cache.copy_blocks(inputs.block_copies)
        self._swap_in(output)  # after the copies, which may read a block that is handed out again in the same step
        needs_all = bool(scored or self._table.poolings)
        hidden, logits = self._forward(inputs.batch, None if needs_all else inputs.batch.logits_indices)
        prompt_scores = self._score_prompts(scored, inputs, hidden)
        sampled = self._sample(step, inputs, logits)
        embeddings = self._pooler.pool(self._table, step, hidden)
        return PendingStep(len(output.rows), self._model.device, sampled, prompt_scores, embeddings)

    def _swap_in(self, output: SchedulerOutput) -> None:
        if output.swapped_in:
            self._kv_cache.swap_in(block_pairs(output.swapped_in))

    def _forward(self, batch: ForwardBatch, wanted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, [num_tokens, hidden_size], at least of `wanted` (None = all), and the sampled rows' logits."""
        replayed = None if self._graphs is None else self._graphs.run(batch)
        if replayed is not None:
            return replayed
        hidden = self._model(batch, self._backend, self._kv_cache.layers, wanted)
        return hidden, self._model.logits(hidden[batch.logits_indices])

    def _sample(self, step: StepRows, inputs: StepInputs, logits: torch.Tensor) -> SampledTokens | None:
        """Choose the tokens of the rows that sample, and keep them for the next step."""
        places = step.samples.nonzero()[0].tolist()
        if not places:
            return None
        ops, num_logprobs = self._model.ops, inputs.num_logprobs
        # Scores are those of the model, so its logits are put aside before they are edited in place.
        scored_logits = logits[inputs.logprob_places] if num_logprobs else None
        if inputs.edits is not None:
            apply_edits(logits, inputs.edits)
        candidates = None
        if inputs.candidates:
            candidates = launch_candidates(ops, logits, inputs.candidate_places, inputs.candidates)
        token_ids = ops.sample(logits, inputs.sampling)
        self._last_token_ids.index_copy_(0, inputs.sampled_rows, token_ids)
        self._table.num_tokens[step.rows[step.samples]] += 1
        scores = None
        if scored_logits is not None:
            num_top = max(num_logprobs.values())
            scores = TokenScores.launch(ops, scored_logits, token_ids[inputs.logprob_places], num_top)
        is_forbidden = None
        if inputs.edits is not None:  # a forbidden token is chosen only where there is no other
            is_forbidden = to_host(logits.gather(1, token_ids[:, None]).squeeze(1) == FORBIDDEN)
        return SampledTokens(places, to_host(token_ids), num_logprobs, scores, is_forbidden, candidates)

    def _score_prompts(
        self, scored: list[ScoredPrompt], inputs: StepInputs, hidden: torch.Tensor
    ) -> list[PromptScores]:
        """Log-probability of each prompt token whose predecessor this step computed, where a request asks for it."""
        launched, first_target = [], 0
        for prompt in scored:
            pieces = []
            for start in range(0, len(prompt.target_ids), _SCORED_ROWS_AT_ONCE):
                end = min(start + _SCORED_ROWS_AT_ONCE, len(prompt.target_ids))
                logits = self._model.logits(hidden[prompt.first + start : prompt.first + end])
                targets = inputs.target_ids[first_target + start : first_target + end]
                pieces.append(TokenScores.launch(self._model.ops, logits, targets, prompt.num_top))
            launched.append(PromptScores(prompt.place, prompt.num_top, pieces))
            first_target += len(prompt.target_ids)
        return launched
