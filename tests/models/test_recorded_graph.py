"""The emulation of CUDA graphs is as strict as a device."""

import pytest
import torch
from torch.nn import functional

from tests.models.recorded_graph import POISONED_INTEGER, CaptureError, CpuGraphRecorder


def recorded(work):
    return CpuGraphRecorder().record(work)


def test_a_replay_reads_and_writes_the_recorded_tensors():
    x, out = torch.ones(3, 4), torch.zeros(3, 4)

    @torch.inference_mode()
    def work():
        total = functional.rms_norm(x * 2, (4,)) + functional.linear(x, torch.eye(4))
        first, second = total.chunk(2, dim=-1)
        out[:, :2].copy_(second)
        out[:, 2:] = first.contiguous().to(torch.float32)
        out.add_(1)

    graph = recorded(work)
    for values in (torch.randn(3, 4), torch.randn(3, 4)):
        x.copy_(values)
        work()
        expected = out.clone()
        out.fill_(7)
        graph.replay()
        assert torch.equal(out, expected)


def test_a_number_of_the_host_is_taken_once():
    host = [2.0]
    x, out = torch.ones(2), torch.zeros(2)
    graph = recorded(lambda: out.copy_(x * host[0] + torch.tensor(host)))
    host[0] = 3.0
    graph.replay()
    assert out.tolist() == [4, 4]


def test_a_tensor_put_in_anothers_place_is_not_seen():
    holder = {"x": torch.ones(2)}
    out = torch.zeros(2)
    graph = recorded(lambda: out.copy_(holder["x"] * 2))
    holder["x"] = torch.full((2,), 5.0)
    graph.replay()
    assert out.tolist() == [2, 2]


def test_what_a_replay_does_not_write_holds_poison():
    kept = {}

    def work():
        kept["floats"] = torch.empty(2)
        kept["integers"] = torch.empty(2, dtype=torch.int32)
        kept["zeros"] = torch.zeros(2)

    graph = recorded(work)
    for tensor in kept.values():
        tensor.fill_(1)
    graph.replay()
    assert kept["floats"].isnan().all()
    assert kept["integers"].tolist() == [POISONED_INTEGER] * 2
    assert kept["zeros"].tolist() == [0, 0]


def test_an_opaque_call_is_repeated_whole():
    recorder = CpuGraphRecorder()
    x, out = torch.ones(2), torch.zeros(2)

    def behind_torch():
        return torch.tensor([value + 1 for value in x.tolist()])

    graph = recorder.record(lambda: out.copy_(recorder.opaque(behind_torch) * 2))
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [10, 10]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: float(x[0]),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.index_put_((x > 1,), torch.tensor(2.0)),
        lambda x: torch.unique(x),
        lambda x: torch.repeat_interleave(x, x.long()),
    ],
)
def test_what_waits_for_the_device_is_refused(work):
    x = torch.arange(3.0)
    work(x)
    with pytest.raises(CaptureError):
        recorded(lambda: work(x))


def test_indexing_by_numbers_is_allowed():
    x, index, out = torch.arange(3.0), torch.tensor([2, 0]), torch.zeros(2)
    graph = recorded(lambda: out.copy_(x[index]))
    index.copy_(torch.tensor([1, 1]))
    graph.replay()
    assert out.tolist() == [1, 1]
