"""What the quality benchmark makes of scores, and that it scores every token of its windows as transformers does."""

import math

import numpy as np
import pytest
import torch

from benchmarks.quality import WINDOW, WINDOWS, Scores, Window, compare, score, windows_of
from benchmarks.served_model import ServedModel
from tests.models.tiny_models import build, save

WINDOWS_OF_TEN = [Window("prose", tuple(range(6))), Window("code", tuple(range(6)))]
FLAGS = {"block_size": "4", "num_gpu_blocks_override": "20", "max_num_seqs": "1", "dtype": "float32", "device": "cpu"}


def scores(logprobs, likeliest=None):
    return Scores(np.array(logprobs, float), np.arange(len(logprobs)) if likeliest is None else np.array(likeliest))


def test_a_model_is_as_good_as_itself():
    same = scores([-1.0, -2.0, -3.0, -4.0, -5.0] * 2)
    found = compare(("none", "float32"), WINDOWS_OF_TEN, same, same)
    assert (found.ratio, found.ratio_error, found.agreement) == (1.0, 0.0, 1.0)
    assert found.perplexity == pytest.approx(math.exp(3))
    assert found.ratio_by_kind == {"prose": 1.0, "code": 1.0}


def test_a_loss_on_one_kind_is_told_of_that_kind():
    exact = scores([-1.0] * 10)
    worse = scores([-1.0] * 5 + [-1.5] * 5, [*range(8), 0, 0])
    found = compare(("int8", "int8"), WINDOWS_OF_TEN, worse, exact)
    assert found.ratio_by_kind == pytest.approx({"prose": 1.0, "code": math.exp(0.5)})
    assert found.ratio == pytest.approx(math.exp(0.25))
    assert found.ratio_error == pytest.approx(found.ratio * np.std([0, 0.5] * 5, ddof=1) / math.sqrt(10))
    assert found.agreement == 0.8


def test_windows_follow_one_another_and_begin_alike():
    texts = {kind: [1000 * place + i for i in range(WINDOW * 9)] for place, kind in enumerate(WINDOWS, start=1)}
    windows = windows_of(texts, [7])
    assert len(windows) == sum(WINDOWS.values())
    assert all(len(window.token_ids) == WINDOW and window.token_ids[0] == 7 for window in windows)
    for kind, count in WINDOWS.items():
        joined = [token for window in windows if window.kind == kind for token in window.token_ids[1:]]
        assert joined == texts[kind][: count * (WINDOW - 1)]


def test_a_short_text_is_refused_by_name():
    texts = {kind: [0] * (WINDOW * 9) for kind in WINDOWS} | {"code": [0] * 9}
    with pytest.raises(ValueError, match="code has 9 tokens"):
        windows_of(texts, [])


@pytest.mark.parametrize("budget", ["32", "7"])
def test_scores_are_those_of_transformers(tmp_path, budget):
    reference = build("llama")
    model = ServedModel(save(reference, tmp_path), {**FLAGS, "max_num_batched_tokens": budget})
    chance = torch.Generator().manual_seed(0)
    token_ids = torch.randint(reference.config.vocab_size, (2, 30), generator=chance)
    found = score(model, [Window("prose", tuple(row)) for row in token_ids.tolist()])
    with torch.inference_mode():
        expected = reference(token_ids).logits.float().log_softmax(-1)[:, :-1]
    of_targets = expected.gather(-1, token_ids[:, 1:, None]).flatten()
    np.testing.assert_allclose(found.logprobs, of_targets.numpy(), atol=1e-4)
    assert found.likeliest.tolist() == expected.argmax(-1).flatten().tolist()
