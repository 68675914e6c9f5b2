"""Tokens by key: every one is counted somewhere, and the series stay few."""

from hypothesis import given
from hypothesis import strategies as st

from server.metric_families import Families
from server.usage_metrics import MAX_KEY_NAMES, NO_KEY, OTHER_KEYS, UsageSeries

NAMES = st.one_of(st.none(), st.sampled_from(["", OTHER_KEYS, NO_KEY]), st.integers(0, 70).map("key-{}".format))


def values_of(series: UsageSeries) -> dict[tuple[str, str | None], float]:
    """By name, and by key, source or neither."""
    return {
        (sample.name, sample.labels.get("key", sample.labels.get("source"))): sample.value
        for family in series.snapshot()()
        for sample in family.samples
    }


@given(
    known=st.lists(st.integers(0, 70).map("key-{}".format), max_size=60, unique=True),
    had=st.lists(st.tuples(NAMES, st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), max_size=120),
)
def test_whoever_asks_is_counted_once_in_a_bounded_number_of_series(known, had):
    series = UsageSeries(Families("m"), known)
    for name, num_tokens, num_cached, num_generated in had:
        usage = series.of(name)
        usage.num_requests += 1
        usage.add_prompt(num_tokens, min(num_cached, num_tokens))
        usage.num_generation_tokens += num_generated
    values = values_of(series)
    keys = {key for name, key in values if name == "octavo_key_requests_total"}
    assert OTHER_KEYS in keys
    assert set(known[:MAX_KEY_NAMES]) <= keys
    assert len(keys) <= MAX_KEY_NAMES + 1
    for of_keys, expected, total in (
        ("octavo_key_requests_total", len(had), None),
        ("octavo_key_prompt_tokens_total", sum(row[1] for row in had), "vllm:prompt_tokens_total"),
        ("octavo_key_generation_tokens_total", sum(row[3] for row in had), "vllm:generation_tokens_total"),
    ):
        assert sum(values[of_keys, key] for key in keys) == expected
        assert total is None or values[total, None] == expected
    cached = sum(min(row[1], row[2]) for row in had)
    assert values["vllm:prompt_tokens_cached_total", None] == cached
    by_source = {key: value for (name, key), value in values.items() if name == "vllm:prompt_tokens_by_source_total"}
    assert by_source == {
        "local_compute": values["vllm:prompt_tokens_total", None] - cached,
        "local_cache_hit": cached,
        "external_kv_transfer": 0,
    }
    kept_in = {key: n for (name, key), n in values.items() if name == "vllm:prompt_tokens_cached_by_source_total"}
    assert kept_in == {"device": cached, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}


def test_a_name_keeps_its_series_when_others_come():
    series = UsageSeries(Families("m"), ["ann"])
    series.of("ann").num_requests += 1
    for number in range(2 * MAX_KEY_NAMES):
        series.of(f"key-{number}").num_requests += 1
    series.of("ann").num_requests += 1
    values = values_of(series)
    assert values["octavo_key_requests_total", "ann"] == 2
    assert values["octavo_key_requests_total", OTHER_KEYS] == MAX_KEY_NAMES + 1
