"""Our histogram shows a scraper what prometheus_client's shows."""

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Oracle

from server.histogram import Histogram
from server.metric_families import render

BOUNDS = (0.0, 0.5, 1.0, 2.5, 1e6)
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 2e6, allow_nan=False))


def shown(text: bytes) -> str:
    """Everything but when the series was made."""
    return re.sub(r"(_created\{.*\}) .*", r"\1", text.decode())


@given(values=st.lists(VALUES, max_size=30))
def test_it_looks_like_the_library_s(values):
    labels = {"model_name": "m", "engine": "0"}
    expected = CollectorRegistry()
    histogram = Histogram("vllm:some_seconds", "Some seconds.", labels, BOUNDS)
    oracle = Oracle("vllm:some_seconds", "Some seconds.", tuple(labels), buckets=BOUNDS, registry=expected)
    for value in values:
        histogram.observe(value)
        oracle.labels(*labels.values()).observe(value)
    oracle.labels(*labels.values())  # a series is there before it has a value
    text = render([histogram.snapshot()])
    assert shown(text) == shown(generate_latest(expected))
    assert b"_created" in text
