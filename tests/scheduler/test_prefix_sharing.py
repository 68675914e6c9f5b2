"""What requests share of their beginnings: named cases of cached prefixes, with whom, and how they are counted."""

import pytest

from tests.scheduler.bench import Bench

PROMPT = tuple(range(1, 19))  # four blocks of four tokens, and two tokens more


def caching(**settings):
    return Bench(**{"num_blocks": 40, "block_size": 4, **settings})


def num_cached(bench, name):
    return bench.reports[name].num_cached_tokens


def ask(bench, name, prompt=PROMPT, **arguments):
    """Add a request and let everything run to its end. Returns the tokens that its first step computed."""
    bench.add(name, prompt=prompt, **{"max_tokens": 3, **arguments})
    num_tokens = bench.step().num_tokens
    bench.drain()
    return num_tokens


def test_the_same_prompt_again_computes_what_is_beyond_its_full_blocks():
    bench = caching()
    assert [ask(bench, "a"), ask(bench, "b")] == [18, 2]
    assert (num_cached(bench, "a"), num_cached(bench, "b")) == (0, 16)
    assert [update.num_cached_tokens for update in bench.updates["b", 0]] == [16] * 3
    stats = bench.scheduler.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_prompt_tokens) == (36, 16, 36)
    bench.assert_all_exact()


def test_the_last_token_of_a_prompt_is_computed_whatever_is_cached():
    bench = caching()
    assert [ask(bench, "a", PROMPT[:16]), ask(bench, "b", PROMPT[:16])] == [16, 4]
    assert num_cached(bench, "b") == 12
    bench.assert_all_exact()


def test_blocks_of_a_request_that_runs_are_shared_at_once():
    bench = caching()
    bench.add("a", prompt=PROMPT, max_tokens=20)
    bench.step()
    num_used = bench.scheduler.stats.num_used_blocks
    bench.add("b", prompt=PROMPT, max_tokens=20)
    assert bench.step().num_tokens == 1 + 2
    assert bench.scheduler.stats.num_used_blocks == num_used + 1
    assert bench.scheduler.stats.num_saved_blocks == 4
    bench.drain()
    bench.assert_all_exact()


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_turn_of_a_chat_begins_with_the_answer_before(overlapped):
    bench = caching(overlapped=overlapped)
    bench.add("a", prompt=PROMPT, max_tokens=10)
    bench.drain()
    bench.add("b", prompt=(*PROMPT, *bench.tokens["a", 0], 40, 41), max_tokens=3)
    bench.drain()
    assert num_cached(bench, "b") == 24  # the last of the 28 tokens was never computed, so its block is not full
    bench.assert_all_exact()


@pytest.mark.parametrize(
    ("first", "second", "hits"),
    [
        ({}, {}, True),
        ({"tenant": "x"}, {"tenant": "x"}, True),
        ({"tenant": "x"}, {"tenant": "y"}, False),
        ({"tenant": "x"}, {}, False),
        ({"cache_salt": "x"}, {"cache_salt": "x"}, True),
        ({"cache_salt": "x"}, {"cache_salt": "y"}, False),
        ({"tenant": "x"}, {"cache_salt": "x"}, False),
        ({"tenant": "xy"}, {"tenant": "x", "cache_salt": "y"}, False),
        ({"tenant": "x", "cache_salt": "s"}, {"tenant": "y", "cache_salt": "s"}, False),
        ({"reuses_cache": False}, {}, True),
        ({}, {"reuses_cache": False}, False),
    ],
)
def test_who_shares_with_whom(first, second, hits):
    bench = caching()
    ask(bench, "a", **first)
    ask(bench, "b", **second)
    assert num_cached(bench, "b") == (16 if hits else 0)
    bench.assert_all_exact()


@pytest.mark.parametrize(
    ("params", "hits"),
    [
        ({"prompt_logprobs": 0}, False),
        ({"pooling": "mean", "max_tokens": 0}, False),
        ({"pooling": "last", "max_tokens": 0}, True),
        ({"max_tokens": 0}, True),
        ({"presence_penalty": 1.0}, True),
    ],
)
def test_results_of_every_prompt_token_need_all_of_them_computed(params, hits):
    bench = caching()
    ask(bench, "a")
    assert ask(bench, "b", **params) == (2 if hits else 18)
    stats = bench.scheduler.stats  # what is not looked up is no miss
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == ((36, 16) if hits else (18, 0))


def test_without_caching_nothing_is_kept():
    bench = caching(enable_prefix_caching=False)
    assert [ask(bench, "a"), ask(bench, "b")] == [18, 18]
    stats = bench.scheduler.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_cached_blocks) == (0, 0, 0)


def test_the_tail_of_a_prefix_is_evicted_before_its_head_and_the_difference_is_told():
    bench = caching(num_blocks=8)
    ask(bench, "a", max_tokens=1)
    ask(bench, "other", tuple(range(30, 48)), max_tokens=1)  # needs five of eight blocks, four of which are cached
    assert bench.scheduler.stats.num_evicted_blocks == 1
    ask(bench, "b")
    assert num_cached(bench, "b") == 12
    ask(bench, "c", (*PROMPT[:6], 49, *PROMPT[7:]))
    assert (num_cached(bench, "c"), bench.reports["c"].first_difference) == (4, 6)
    bench.assert_all_exact()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_siblings_begin_with_a_cached_prompt(overlapped, num_own):
    bench = caching(overlapped=overlapped)
    ask(bench, "a")
    bench.add("b", prompt=(*PROMPT[:16], *range(num_own)) or (1,), n=3, max_tokens=6)
    bench.drain()
    assert num_cached(bench, "b") == (16 if num_own else 12)
    bench.assert_all_exact()


def test_what_is_found_again_after_a_preemption_is_no_hit_and_not_recomputed():
    bench = caching(num_blocks=8)
    bench.add("a", prompt=PROMPT[:9], max_tokens=12)
    bench.add("b", prompt=tuple(range(30, 39)), max_tokens=12)
    bench.drain()
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits == 0
    lost = sum(preemption.num_lost_tokens for report in bench.reports.values() for preemption in report.preemptions)
    assert 0 < stats.num_recomputed_tokens < lost
    bench.assert_all_exact()


def test_of_equal_prompts_that_come_at_once_each_block_is_kept_once():
    bench = caching(num_blocks=60)
    for name in "abcd":
        bench.add(name, prompt=PROMPT, max_tokens=1)
    bench.drain()
    assert bench.scheduler.stats.num_cached_blocks == 4
    bench.assert_all_exact()
