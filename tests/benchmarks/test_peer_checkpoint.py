"""A .gguf file written as a directory is the same model and the same tokenizer to transformers."""

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from benchmarks.peer_checkpoint import CheckpointNotWritten, write_model
from benchmarks.saved_tokenizer import save_tokenizer
from tests.models.gguf_files import to_gguf
from tests.models.tiny_models import build, oracle_logits
from tests.server.real_tokenizers import smollm2, texts

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_the_directory_has_the_weights_of_the_file(name, tmp_path):
    model = build(name)
    gguf = to_gguf(model, tmp_path / "model.gguf", lambda _: Type.Q8_0)
    (tmp_path / "directory").mkdir()
    write_model(gguf, tmp_path / "directory")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "directory").eval()
    assert read.dtype == torch.float32
    torch.testing.assert_close(oracle_logits(read, PROMPT), oracle_logits(model, PROMPT))


@pytest.mark.parametrize(("name", "reason"), [("gemma3", "family gemma3_text"), ("qwen3", "another shape")])
def test_what_would_be_another_model_is_refused(name, reason, tmp_path):
    # transformers reads no head size of its own from a Qwen file.
    with pytest.raises(CheckpointNotWritten, match=reason):
        write_model(to_gguf(build(name), tmp_path / "model.gguf"), tmp_path)


def test_the_directory_has_the_tokenizer_of_the_file(tmp_path):
    save_tokenizer(smollm2(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [read(text).input_ids for text in texts()] == [smollm2().encode(text) for text in texts()]
    assert read.eos_token_id == smollm2().eos_token_ids[0]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u 123"}]
    assert read.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu 123<|im_end|>\n<|im_start|>assistant\n"
    )
