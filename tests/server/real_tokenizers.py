"""The tokenizers of the real models and the texts that tests put through them, loaded once."""

from functools import cache

from server.tokenizer import Tokenizer, load_tokenizer
from tests import data_files
from tests.model_files import gemma3_path, smollm2_path

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))  # as SentencePiece vocabularies spell them


@cache
def smollm2() -> Tokenizer:
    """SmolLM2's, from its GGUF file."""
    return load_tokenizer(smollm2_path())


@cache
def gemma3() -> Tokenizer:
    """Gemma 3's, from its GGUF file."""
    return load_tokenizer(gemma3_path())


@cache
def texts() -> tuple[str, ...]:
    """About 2,000 real and hostile texts in many scripts."""
    return (
        *data_files.mt_bench_prompts(),
        *data_files.gsm8k_prompts(),
        *data_files.humaneval_prompts(),
        *(text for prompts in data_files.mgsm_prompts().values() for text in prompts),
        *data_files.naughty_strings(),
        *data_files.emoji()[::8],
        *("".join(clusters) for clusters in data_files.grapheme_tests()),
    )
