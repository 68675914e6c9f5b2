"""Requests for embeddings through the scheduler and the runner: preempted, in chunks, beside others, a step ahead."""

from collections import deque

import numpy as np
import pytest
import torch

from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.models.served import Served, toy_decoder


@pytest.fixture(scope="module")
def model():
    return toy_decoder()


def embed(served, requests, num_steps_ahead=0):
    """The pooled hidden states of every request for them; what the others generate is passed over.

    One request comes each step; those for answers are more urgent.
    """
    arriving, vectors, in_flight = deque(requests.items()), {}, deque()
    while arriving or served.scheduler.has_unfinished or in_flight:
        if arriving:
            request_id, (prompt, params) = arriving.popleft()
            served.scheduler.add(
                Request(request_id, tuple(prompt), params, 0.0, priority=int(params.pooling is not None))
            )
        if served.scheduler.has_unfinished:
            output = served.scheduler.schedule()
            in_flight.append((output, served.runner.launch(output)))
        if len(in_flight) <= num_steps_ahead and served.scheduler.has_unfinished:
            continue
        output, pending = in_flight.popleft()
        for update in served.scheduler.update(output, pending.result()):
            if update.embedding:
                assert (update.finish_reason, update.token_ids) == ("stop", ())
                vectors[update.request_id] = np.frombuffer(update.embedding, "<f4")
        served.scheduler.check_integrity()
    return vectors


def workload(pooling):
    generator = torch.Generator().manual_seed(2)
    requests = {}
    for i, length in enumerate((40, 3, 61, 1, 17, 80, 33)):
        prompt = torch.randint(0, 101, (length,), generator=generator).tolist()
        requests[f"embedding {i}"] = (prompt, SamplingParams(max_tokens=0, pooling=pooling))
        requests[f"answer {i}"] = (prompt[:5], SamplingParams(max_tokens=30, ignore_eos=True, seed=i))
    return requests


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_preemption_changes_no_embedding(model, pooling, num_steps_ahead):
    alone = {}
    for name, request in workload(pooling).items():
        if request[1].pooling:
            alone |= embed(Served(model), {name: request})
    served = Served(model, num_blocks=28, max_num_batched_tokens=5)
    preempted = set()
    preempt = served.scheduler._queues.preempt
    served.scheduler._queues.preempt = lambda sequence: (preempted.add(_what(sequence)), preempt(sequence))
    together = embed(served, workload(pooling), num_steps_ahead)
    assert (pooling, True) in preempted  # in the middle of its prompt
    assert together.keys() == alone.keys()
    for name, vector in alone.items():
        np.testing.assert_allclose(together[name], vector, rtol=1e-4, atol=1e-5)


def _what(sequence):
    return sequence.request.params.pooling, sequence.num_computed_tokens > 0
