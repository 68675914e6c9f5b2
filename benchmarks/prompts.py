"""Prompts of a fixed number of words for load: real text, all different, the same in every run."""

import random

from tests import data_files


def make_prompts(count: int, num_words: int, seed: int) -> list[str]:
    """Different stretches of `num_words` words each, from MT-bench's and GSM8K's questions.

    They begin at different words of one long text, so that a cache of common prefixes gains nothing.

    Raises:
        ValueError: if the text has fewer than `count` places to begin at.
    """
    words = " ".join((*data_files.mt_bench_prompts(), *data_files.gsm8k_prompts())).split()
    num_places = len(words) - num_words + 1
    if count > num_places:
        raise ValueError(f"the text has room for {num_places} different prompts of {num_words} words, not {count}")
    starts = random.Random(seed).sample(range(num_places), count)
    return [" ".join(words[start : start + num_words]) for start in starts]
