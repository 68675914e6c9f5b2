"""The line through the costs of tokens, and that the benchmark computes the text it says it does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import context_cost
from benchmarks.context_cost import CHUNK, DECODE_STEPS, Bench, doubling_contexts, fit_line, growth, measure
from benchmarks.served_model import ServedModel
from tests.models.tiny_models import build, save

CONTEXTS = [128, 256, 512, 1024, 2048, 4096, 8064]


@given(st.floats(1e-4, 1), st.floats(0, 1e-3))
def test_a_straight_line_is_found(at_zero, per_token):
    line = fit_line(CONTEXTS, [at_zero + per_token * context for context in CONTEXTS])
    assert line.at_zero == pytest.approx(at_zero, rel=1e-6, abs=1e-9)
    assert line.per_token == pytest.approx(per_token, rel=1e-6, abs=1e-9 * at_zero)
    assert line.largest_deviation < 1e-6


def test_what_grows_with_the_square_is_no_line():
    seconds = [0.004 + 1e-9 * context**2 for context in CONTEXTS]
    assert fit_line(CONTEXTS, seconds).largest_deviation > 0.3


def test_growth_goes_through_the_medians():
    found = growth({128: [9.0, 1.0, 2.0], 256: [3.0, 4.0]})
    assert (found.contexts, found.seconds) == ((128, 256), (2.0, 3.5))


@pytest.mark.parametrize(("longest", "contexts"), [(8064, CONTEXTS), (300, [128, 256]), (128, [128])])
def test_contexts_double_and_are_whole_chunks(longest, contexts):
    assert doubling_contexts(longest) == contexts


class Recorder:
    """A model that is told of its calls and keeps the tokens and blocks of each."""

    info = type("Info", (), {"block_size": 16})

    def __init__(self):
        self.calls = []

    def start(self, token_ids, params, block_ids, num_computed, num_new):
        self.calls.append((len(token_ids), num_computed, num_new, tuple(block_ids)))

    def proceed(self, num_computed, num_new):
        self.calls.append((num_computed, num_new))

    def finish(self):
        self.calls.append("finish")


def test_a_visit_reads_the_blocks_of_the_text_and_writes_its_own():
    model = Recorder()
    bench = Bench(model, range(1000), 512)
    text_blocks = model.calls[0][3]
    assert model.calls[1:] == [(128, 128), (256, 128), (384, 128), "finish"]
    model.calls.clear()
    bench.decode(256)
    bench.prefill(256)
    decoded, prefilled = model.calls[0], model.calls[-2]
    assert decoded[:3] == (256, 255, 1) and prefilled[:3] == (256 + CHUNK, 256, CHUNK)
    assert model.calls[1 : 1 + DECODE_STEPS] == [(256 + i, 1) for i in range(DECODE_STEPS)]
    for call in (decoded, prefilled):
        assert call[3][:16] == text_blocks[:16]
        assert not set(call[3][16:]) & set(text_blocks) and len(call[3]) == 16 + CHUNK // 16


def test_a_short_text_is_refused():
    with pytest.raises(ValueError, match="give a smaller --longest"):
        Bench(Recorder(), range(600), 512)


def test_a_tiny_model_is_measured_at_every_context(tmp_path, monkeypatch):
    monkeypatch.setattr(context_cost, "CHUNK", 8)
    flags = {"block_size": "4", "num_gpu_blocks_override": "40", "device": "cpu", "max_num_seqs": "1"}
    model = ServedModel(save(build("llama"), tmp_path), flags)
    bench = Bench(model, [i % 50 for i in range(60)], 32)
    with context_cost.Progress(disable=True) as progress:
        decode, prefill = measure(bench, [8, 16, 32], 2, progress)
    assert decode.contexts == prefill.contexts == (8, 16, 32)
    assert all(seconds > 0 for seconds in (*decode.seconds, *prefill.seconds))
