"""What is shown of a model is what it computes: against transformers, with the cache and without it."""

import random
from pathlib import Path

import pytest
import torch

import models.float_decoder
from kernels.model_ops.torch_ops import TorchOps
from models.float_decoder import load_float_decoder
from models.inspection import HABITS, attention_weights, inspect, kv_head_of, record_bytes
from models.memory import NotEnoughMemory
from server.tokenizer import load_tokenizer
from tests.models.tiny_models import BUILDERS, build, oracle_logits, save

CPU = torch.device("cpu")
PROMPT = [random.Random(5).randrange(3, 211) for _ in range(19)]
BLOCK_SIZE = 4
NUM_BLOCKS = 9


def shuffled_blocks(num_tokens: int) -> list[int]:
    """The block table of as many tokens, out of order as a busy pool hands blocks out."""
    ids = list(range(NUM_BLOCKS))
    random.Random(2).shuffle(ids)
    return ids[: -(-num_tokens // BLOCK_SIZE)]


def load(path: Path, **settings):
    options = {"dtype": torch.float32, "quantization": "none", "packed": None, "num_more_bytes": 0, **settings}
    return load_float_decoder(path, **options)


def look(decoder, max_tokens=8, prompt=PROMPT):
    return inspect(decoder, prompt, max_tokens, NUM_BLOCKS, BLOCK_SIZE, shuffled_blocks)


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "gemma3_multimodal"])
@torch.inference_mode()
def test_attention_and_next_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = build(name)
    decoder = load(save(oracle, tmp_path))
    seen = look(decoder)
    computed = torch.tensor([seen.token_ids[:-1]])
    expected = oracle(input_ids=computed, output_attentions=True)
    for layer, of_heads in enumerate(expected.attentions):
        for head, weights in enumerate(of_heads[0]):
            view = seen.head(layer, head)
            assert (view.weights - weights).abs().max() < 1e-4
    for step in seen.steps:
        logits = expected.logits[0, step.first_position + step.num_tokens - 1]
        assert step.next_token_id == int(logits.argmax())
        for token_id, probability in step.candidates:
            assert probability == pytest.approx(float(logits.softmax(-1)[token_id]), abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral_window"])
def test_the_cache_changes_nothing_that_is_seen(name: str, tmp_path: Path) -> None:
    """Token by token with the cache, and all tokens in one pass, which has nothing to read from it."""
    decoder = load(save(build(name), tmp_path))
    seen = look(decoder)
    whole = look(decoder, max_tokens=1, prompt=seen.token_ids[:-1])
    assert [step.num_tokens for step in seen.steps] == [len(PROMPT)] + [1] * 7
    assert [step.first_position for step in seen.steps] == [0, *range(len(PROMPT), len(PROMPT) + 7)]
    assert whole.token_ids == seen.token_ids
    torch.testing.assert_close(whole.inputs, seen.inputs[:, : seen.num_computed], rtol=1e-4, atol=1e-4)
    for layer in range(len(decoder.layers)):
        for head in range(decoder.config.num_q_heads):
            cached, uncached = seen.head(layer, head), whole.head(layer, head)
            for part in cached.__slots__:
                torch.testing.assert_close(getattr(cached, part), getattr(uncached, part), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@torch.inference_mode()
def test_the_parts_make_up_the_attention(name: str, tmp_path: Path) -> None:
    """X W gives Q, K and V; the weights times V, through the output projection, are what the layer adds."""
    decoder = load(save(build(name), tmp_path))
    added: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(decoder.layers):
        layer.attention.register_forward_hook(lambda _, __, out, index=index: added.__setitem__(index, out))
    seen = look(decoder, max_tokens=1)
    config = decoder.config
    for index, layer in enumerate(decoder.layers):
        heads = [seen.head(index, head) for head in range(config.num_q_heads)]
        attended = torch.cat([view.weights @ view.value for view in heads], dim=-1)
        torch.testing.assert_close(layer.attention.output(attended), added[index], rtol=1e-4, atol=1e-4)
        projected = layer.attention.qkv(seen.inputs[index]).unflatten(-1, (-1, config.head_dim))
        torch.testing.assert_close(projected, seen.projected[index])
        for head, view in enumerate(heads):
            rows = view.weights.sum(dim=-1)
            torch.testing.assert_close(rows, torch.ones_like(rows))
            assert torch.equal(view.weights.triu(1), torch.zeros_like(view.weights))
            # A rotation keeps lengths, and the first position is not rotated.
            torch.testing.assert_close(view.query.norm(dim=-1), view.rotated_query.norm(dim=-1))
            torch.testing.assert_close(view.key[0], view.rotated_key[0])
            value = projected[:, config.num_q_heads + config.num_kv_heads + kv_head_of(config, head)]
            torch.testing.assert_close(view.value, value)
            if layer.attention.qk_norm is None:
                torch.testing.assert_close(view.query, projected[:, head])


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_habits_are_what_the_weights_of_each_head_say(name: str, tmp_path: Path) -> None:
    pattern = [7, 9, 11, 7, 9, 5, 7, 7]
    seen = look(load(save(build(name), tmp_path)), max_tokens=4, prompt=pattern)
    tokens, habits = seen.token_ids[:-1], seen.habits()
    assert habits.shape == (len(seen.kv_layers), seen.decoder.config.num_q_heads, len(HABITS))
    for layer, head in ((0, 0), (1, 3)):
        weights = seen.head(layer, head).weights.tolist()
        rows = range(2, len(tokens))
        after_same = {t: [j + 1 for j in range(t - 1) if tokens[j] == tokens[t]] for t in range(len(tokens))}
        repeated = [sum(weights[t][j] for j in places) for t, places in after_same.items() if places]
        assert len(repeated) >= 4
        expected = {
            "first": [weights[t][0] for t in rows],
            "itself": [weights[t][t] for t in rows],
            "previous": [weights[t][t - 1] for t in rows],
            "repeated": repeated,
        }
        for index, habit in enumerate(HABITS):
            mean = sum(expected[habit]) / len(expected[habit])
            assert float(habits[layer, head, index]) == pytest.approx(mean, abs=1e-5), habit
    short = look(seen.decoder, max_tokens=1, prompt=[7, 9])
    assert not short.habits().any()  # with two tokens there is nothing to choose
    unlike = look(seen.decoder, max_tokens=1, prompt=[7, 9, 11])
    assert unlike.habits()[..., :3].all() and not unlike.habits()[..., 3].any()  # nothing stood there before


def test_a_window_hides_what_lies_before_it(tmp_path: Path) -> None:
    seen = look(load(save(build("mistral_window"), tmp_path)))
    weights = seen.head(0, 0).weights
    positions = torch.arange(len(weights))
    assert not weights[positions[:, None] - positions >= 6].any()
    assert (weights[positions[:, None] - positions == 5] > 0).all()


def test_it_ends_where_the_model_ends(tmp_path: Path) -> None:
    decoder = load(save(build("llama"), tmp_path))
    second = look(decoder).token_ids[len(PROMPT) + 1]
    object.__setattr__(decoder.config, "eos_token_ids", (second,))
    seen = look(decoder)
    assert seen.token_ids[-1] == second and len(seen.steps) <= 2
    assert seen.num_computed == len(seen.token_ids) - 1


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", torch.float32), ("none", torch.bfloat16)])
def test_weights_have_the_values_that_are_served(quantization: str, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = build("llama_tied")
    path = save(oracle, tmp_path)
    decoder = load(path, quantization=quantization, dtype=dtype)
    exact = load(path)
    assert all(parameter.dtype == torch.float32 for parameter in decoder.parameters())
    assert decoder.head.weight is decoder.embedding
    differs = False
    for (name, served), (_, stored) in zip(decoder.named_parameters(), exact.named_parameters(), strict=True):
        assert (served - stored).abs().max() <= 0.01 * stored.abs().max(), name
        differs |= not torch.equal(served, stored)
    assert differs


@pytest.mark.parametrize("name", ["llama", "qwen2_tied", "gemma3"])
def test_memory_is_asked_for_before_anything_is_loaded(name: str, tmp_path: Path, monkeypatch) -> None:
    path = save(build(name), tmp_path)
    held = sum(parameter.nbytes for parameter in load(path).parameters())
    monkeypatch.setattr(models.float_decoder, "available_host_bytes", lambda: held + 999)
    load(path, num_more_bytes=999)
    monkeypatch.setattr(models.float_decoder, "load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(NotEnoughMemory, match="GiB"):
        load(path, num_more_bytes=1000)


def test_what_it_keeps_is_what_was_said(tmp_path: Path) -> None:
    decoder = load(save(build("qwen3"), tmp_path))
    seen = look(decoder, max_tokens=6)
    assert seen.num_computed == 24
    assert seen.num_bytes == record_bytes(decoder.config, 24)  # six whole blocks


def test_scores_are_capped_before_they_are_compared() -> None:
    from kernels.attention.metadata import AttentionParams

    query, key = torch.tensor([[100.0], [100.0]]), torch.tensor([[1.0], [2.0]])
    params = AttentionParams(1.0, logit_softcap=2.0)
    capped = 2.0 * torch.tanh(torch.tensor([100.0, 200.0]) / 2.0)
    torch.testing.assert_close(attention_weights(query, key, params)[1], capped.softmax(0))


def test_logits_equal_those_of_transformers_on_the_prompt(tmp_path: Path) -> None:
    oracle = build("llama")
    decoder = load(save(oracle, tmp_path))
    step = look(decoder, max_tokens=1).steps[0]
    expected = oracle_logits(oracle, PROMPT)[-1].softmax(-1)
    assert dict(step.candidates)[step.next_token_id] == pytest.approx(float(expected.max()), abs=1e-5)
    assert isinstance(decoder.ops, TorchOps)


CAPITALS = "Paris is the capital of France, Rome is the capital of Italy, and Madrid is the capital of"


@torch.inference_mode()
def test_a_real_model_attends_as_in_transformers_and_as_the_documentation_says(
    smollm2_path: Path, smollm2_reference, monkeypatch
) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    decoder = load(smollm2_path)
    seen = inspect(decoder, tokenizer.encode(CAPITALS), 4, 8, 16, lambda num_tokens: range(-(-num_tokens // 16)))
    assert tokenizer.decode(seen.token_ids).startswith(CAPITALS + " Spain")
    monkeypatch.setattr(smollm2_reference.config, "_attn_implementation", "eager")  # the one that tells its weights
    computed = torch.tensor([seen.token_ids[:-1]])
    attentions = smollm2_reference(input_ids=computed, output_attentions=True).attentions
    for layer in (0, 16, 17, 29):
        for head in range(9):
            assert (seen.head(layer, head).weights - attentions[layer][0, head]).abs().max() < 1e-3
    back = seen.head(16, 0).weights.diagonal(-1).mean()
    assert back > 0.5 and seen.habits()[..., HABITS.index("previous")].max() == seen.habits()[16, 0, 2]
    last, italy = seen.num_prompt_tokens - 1, [tokenizer.token_text(i) for i in seen.token_ids].index(" Italy")
    assert seen.head(17, 5).weights[last].argmax() == italy  # it follows the token "of" before the last one
