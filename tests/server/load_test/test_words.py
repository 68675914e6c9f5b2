"""Made-up texts: their length in words and tokens, and that no two of different seeds begin alike."""

import pytest

from server.load_test.words import make_token_ids, make_words
from tests.server.real_tokenizers import gemma3, smollm2


@pytest.mark.parametrize("num_words", [1, 5, 8, 9, 1000, 70_000])
def test_a_text_has_the_words_that_were_asked_for(num_words):
    text = make_words(num_words, "a")
    assert len(text.split()) == num_words == text.count(" ")


def test_texts_of_different_seeds_begin_differently():
    texts = {make_words(40, f"seed {number}")[:40] for number in range(2000)}
    assert len(texts) == 2000
    assert make_words(40, "seed 1") == make_words(40, "seed 1")


@pytest.mark.parametrize("num_words", [1, 7, 8, 9, 100])
def test_a_shorter_text_begins_a_longer_one(num_words):
    assert make_words(300, "e").startswith(make_words(num_words, "e"))


@pytest.mark.parametrize("tokenizer", [smollm2, gemma3])
def test_a_word_is_a_token(tokenizer):
    assert len(tokenizer().encode(make_words(3000, "b"), add_special_tokens=False)) == 3000


def test_token_ids_lie_in_their_range():
    ids = make_token_ids(5000, "c", 100, 110)
    assert len(ids) == 5000 and set(ids) == set(range(100, 110))
    assert ids != make_token_ids(5000, "d", 100, 110)
