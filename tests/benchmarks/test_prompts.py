"""Prompts for load: their length, and that no two can share a cached prefix."""

import pytest

from benchmarks.prompts import make_prompts


def test_prompts_have_their_length_and_all_begin_differently():
    prompts = make_prompts(1000, 128, seed=0)
    assert len(prompts) == 1000
    assert {len(prompt.split()) for prompt in prompts} == {128}
    # 16 words make at least one block of 16 tokens
    assert len({tuple(prompt.split()[:16]) for prompt in prompts}) == 1000


def test_prompts_are_the_same_for_the_same_seed_only():
    assert make_prompts(20, 128, seed=3) == make_prompts(20, 128, seed=3)
    assert not set(make_prompts(20, 128, seed=3)) & set(make_prompts(20, 128, seed=4))


def test_more_prompts_than_there_are_places_is_refused():
    with pytest.raises(ValueError, match="room for"):
        make_prompts(10**6, 128, seed=0)
