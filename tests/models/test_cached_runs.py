"""Whole runs that begin with cached blocks, or bring blocks back from the host: the same tokens and the same scores.

On the native kernels bitwise the same: what stands in a block does not depend on the step that put it there.
"""

import pytest
import torch

from kernels.model_ops.native_ops import NativeOps
from kernels.model_ops.torch_ops import TorchOps
from scheduler.sampling_params import SamplingParams
from tests.kernels.conftest import make_backend
from tests.models.served import Served, toy_decoder

BACKENDS = [
    ("torch", "float32"),
    ("torch", "int8"),
    ("torch", "float8_e4m3fn"),
    ("cpu", "float32"),
    ("cpu", "bfloat16"),
    ("cpu", "int8"),
    ("cpu", "float8_e4m3fn"),
]
TIGHT = {"num_blocks": 26, "max_num_seqs": 6, "max_num_batched_tokens": 11}
SWAPPING = {"num_host_blocks": 60, "recompute_seconds_per_token": 1.0, "swap_seconds_per_block": 1e-6}


@pytest.fixture(scope="module", params=BACKENDS, ids=" ".join)
def setting(request):
    """A model, the settings of its attention, and what it answers when nothing is cached and nothing gives way."""
    backend, kv_dtype = request.param
    make_backend(backend)
    model = toy_decoder(NativeOps() if backend == "cpu" else TorchOps())
    attention = {"backend": backend, "kv_dtype": kv_dtype}
    served = Served(model, **attention, enable_prefix_caching=False)
    expected = conversations(served)
    assert (served.scheduler.stats.num_prefix_hits, served.scheduler.stats.num_preemptions) == (0, 0)
    return model, attention, expected


def random_tokens(num_tokens, seed):
    return torch.randint(8, 101, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def params(index, num_tokens=9):
    """Greedy and sampled requests, of one answer and of several."""
    return SamplingParams(
        max_tokens=num_tokens,
        n=1 + index % 3,
        temperature=(0.0, 0.9)[index % 2],
        seed=index,
        logprobs=3,
        ignore_eos=True,
    )


def conversations(served, num_steps_ahead=0):
    """Three turns of five conversations, four of which begin alike; every answer stands in the next turn's prompt."""
    beginning = random_tokens(17, seed=1)
    prompts = {f"c{i}": beginning[: 17 - 3 * (i == 3)] + random_tokens(2 + i, seed=i) for i in range(4)}
    prompts["other"] = random_tokens(13, seed=99)
    tokens, logprobs = [], []
    for turn in range(3):
        requests = {f"{name}-{turn}": (prompt, params(i)) for i, (name, prompt) in enumerate(prompts.items())}
        answers, scores, _ = served.run(requests, num_steps_ahead)
        tokens.append(answers)
        logprobs.append(scores)
        for i, name in enumerate(prompts):
            prompts[name] = [*prompts[name], *answers[f"{name}-{turn}", 0], *random_tokens(1 + i, seed=50 * turn + i)]
    return tokens, logprobs


def assert_same(got, expected, backend):
    """Tokens, and log-probabilities: as bits where the backend promises it."""
    assert got[0] == expected[0]
    for ours, theirs in zip(got[1], expected[1], strict=True):
        if backend == "cpu":
            assert ours == theirs
        for key in theirs:
            values = [[score.logprob, *(value for _, value in score.top)] for score in theirs[key]]
            found = [[score.logprob, *(value for _, value in score.top)] for score in ours[key]]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(values), atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
def test_answers_are_the_same_with_cached_prefixes_and_without(setting, num_steps_ahead):
    model, attention, expected = setting
    for limits in ({}, TIGHT):
        served = Served(model, **attention, **limits)
        assert_same(conversations(served, num_steps_ahead), expected, attention["backend"])
        stats = served.scheduler.stats
        assert stats.num_prefix_hits > 100
        assert (stats.num_evicted_blocks > 0) == (stats.num_preemptions > 0) == bool(limits)


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_answers_are_the_same_after_swapping(setting, enable_prefix_caching, num_steps_ahead):
    model, attention, expected = setting
    served = Served(model, **attention, enable_prefix_caching=enable_prefix_caching, **TIGHT, **SWAPPING)
    assert_same(conversations(served, num_steps_ahead), expected, attention["backend"])
    stats = served.scheduler.stats
    assert stats.num_swapped_out_blocks > 0
    assert stats.num_swapped_in_blocks > 0
    assert stats.num_used_host_blocks == 0
