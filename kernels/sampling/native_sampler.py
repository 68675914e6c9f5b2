"""Chooses and ranks tokens in the native CPU library, one thread a row, without sorting the vocabulary.

The semantics are those of torch_sampler.py. Turns tensors into pointers and sizes; the arithmetic is in kernels/cpu.
Knows no sequences.
"""

import ctypes

import torch

from kernels.cpu.native_library import SampleArgs, TokenLogprobsArgs, check_status
from kernels.sampling.sampling_batch import SamplingBatch


class NativeSampler:
    """One library and instruction set. Runs on torch's own threads, whose number changes no result."""

    def __init__(self, library: ctypes.CDLL, instruction_set_code: int) -> None:
        """Take a library that is loaded, and the code of an instruction set that it supports."""
        self._library = library
        self._instruction_set_code = instruction_set_code

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Choose one token for each row; see `kernels.sampling.torch_sampler.sample`.

        The cumulative distribution is within 1e-6 of the exact one; tokens whose probabilities differ by less than the
        rounding of float32 tie at a cut. Of equally likely tokens a greedy row takes the first. A row with a NaN takes
        the first of them, one without a finite maximum the first of those, as `torch.argmax` does.

        Args:
            logits: [num_rows, vocab_size] float32.
            batch: one entry per row.

        Returns:
            [num_rows] int64.
        """
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and vocab_size > 0
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        args = SampleArgs(
            logits=logits.data_ptr(),
            temperature=_pointer(batch.temperature, torch.float32, num_rows),
            top_k=_pointer(batch.top_k, torch.int64, num_rows),
            top_p=_pointer(batch.top_p, torch.float32, num_rows),
            min_p=_pointer(batch.min_p, torch.float32, num_rows),
            uniform=_pointer(batch.uniform, torch.float64, num_rows),
            token_ids=token_ids.data_ptr(),
            num_rows=num_rows,
            vocab_size=vocab_size,
            logits_stride=logits.stride(0),
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_sample(ctypes.byref(args)))
        return token_ids

    def token_logprobs(
        self,
        logits: torch.Tensor,  # [num_rows, vocab_size] float32
        token_ids: torch.Tensor | None,  # [num_rows] int64
        num_top: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `kernels.model_ops.ops.ModelOps.token_logprobs`. Equally likely tokens come in the order of their ids."""
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_top <= vocab_size
        logprobs = torch.empty(0 if token_ids is None else num_rows)
        top_ids = torch.empty((num_rows, num_top), dtype=torch.int64)
        top_logprobs = torch.empty((num_rows, num_top))
        args = TokenLogprobsArgs(
            logits=logits.data_ptr(),
            token_ids=None if token_ids is None else _pointer(token_ids, torch.int64, num_rows),
            logprobs=logprobs.data_ptr(),
            top_ids=top_ids.data_ptr(),
            top_logprobs=top_logprobs.data_ptr(),
            num_rows=num_rows,
            vocab_size=vocab_size,
            logits_stride=logits.stride(0),
            num_top=num_top,
            instruction_set=self._instruction_set_code,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_token_logprobs(ctypes.byref(args)))
        return logprobs, top_ids, top_logprobs


def _pointer(column: torch.Tensor, dtype: torch.dtype, num_rows: int) -> int:
    assert column.shape == (num_rows,) and column.dtype == dtype and column.is_contiguous()
    return column.data_ptr()
