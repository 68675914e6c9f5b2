"""The numbers of a report against oracles written another way: sorted samples, and sums over a made-up load."""

import random
from array import array
from math import floor
from statistics import fmean, pstdev

import numpy as np
import pytest

from server.load_test.objective import Objective
from server.load_test.record import Record
from server.load_test.summary import describe, summarise, warnings_of


def record(due, first=None, gaps=(), *, counted=None, error=None, sent=None, **fields):
    """An answer whose first piece comes `first` seconds after it was due, the others after `gaps`."""
    times = array("d")
    if first is not None:
        times.append(due + first)
        for gap in gaps:
            times.append(times[-1] + gap)
    ended = times[-1] if times else due + 1.0
    return Record(
        fields.pop("session", 0),
        0,
        due,
        fields.pop("max_tokens", 10),
        sent=due if sent is None else sent,
        ended=ended,
        piece_times=times,
        num_counted_tokens=counted,
        error_kind=error,
        error_message=error and f"{error} it was",
        **fields,
    )


@pytest.mark.parametrize("num_samples", [1, 2, 3, 10, 997])
def test_percentiles_are_those_of_numpy_and_of_the_textbook(num_samples):
    chance = random.Random(num_samples)
    samples = [chance.lognormvariate(0, 1) for _ in range(num_samples)]
    percents = (0.0, 25.0, 50.0, 90.0, 99.0, 99.9, 100.0)
    latency = describe(samples, percents)
    ordered = sorted(samples)
    for percent in percents:
        place = percent / 100 * (num_samples - 1)
        below = floor(place)
        above = min(below + 1, num_samples - 1)
        expected = ordered[below] + (place - below) * (ordered[above] - ordered[below])
        assert latency.percentiles[f"p{percent:g}"] == pytest.approx(expected)
        assert latency.percentiles[f"p{percent:g}"] == np.percentile(samples, percent)
    assert (latency.least, latency.most) == (ordered[0], ordered[-1])
    assert latency.mean == pytest.approx(fmean(samples)) and latency.deviation == pytest.approx(pstdev(samples))


def test_no_samples_are_no_error():
    assert describe([], (50.0,)).percentiles == {"p50": None}
    summary = summarise([], Objective(ttft=1.0))
    assert (summary.num_requests, summary.seconds, summary.kept_share, summary.errors) == (0, 0.0, 0.0, ())


def test_a_load_is_summed_up():
    records = [
        record(1.0, 0.5, (0.1, 0.3), counted=5, num_prompt_tokens=7, num_cached_tokens=2, session=0),
        record(2.0, 0.1, (), counted=1, num_prompt_tokens=9, num_cached_tokens=0, session=1, sent=2.05),
        record(3.0, 0.2, (0.2,), error="broken off", session=2),
        record(4.0, error="http 429", session=3),
        record(4.0, error="unsent", session=3),
    ]
    summary = summarise(records, Objective(), client_seconds=1.0, num_sent_again=3)
    assert summary.seconds == 5.0
    assert (summary.num_requests, summary.num_answered, summary.num_sessions) == (5, 2, 4)
    assert {error.kind: error.count for error in summary.errors} == {"broken off": 1, "http 429": 1, "unsent": 1}
    assert summary.errors[0].example == f"{summary.errors[0].kind} it was"
    assert summary.offered_rate == pytest.approx(1.0)  # due at 1, 2, 3 and 4
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (16, 2)
    assert summary.num_output_tokens == 5 + 1 + 2 and summary.output_tokens_by == "usage and pieces of text"
    assert summary.ttft.mean == pytest.approx(0.3) and summary.ttft.num_samples == 2
    assert summary.itl.mean == pytest.approx(0.2) and summary.itl.num_samples == 2
    assert summary.tpot.mean == pytest.approx(0.4 / 4) and summary.tpot.num_samples == 1
    assert summary.end_to_end.most == pytest.approx(0.9)
    assert summary.lateness.most == pytest.approx(0.05)
    assert summary.client_processors == pytest.approx(0.2) and summary.num_sent_again == 3
    assert summary.num_kept is None and summary.goodput is None


@pytest.mark.parametrize(
    ("client_seconds", "lateness", "num_tokens", "sentences"),
    [
        (0.5, 0.0, 10, []),
        (0.9, 0.0, 10, ["the client kept 0.90 processors busy"]),
        (0.5, 0.02, 10, []),
        (0.5, 0.06, 10, ["sent 60 ms or more after they were due"]),
        (0.5, 0.0, 8, ["answers were shorter than asked for"]),
    ],
)
def test_readers_are_warned(client_seconds, lateness, num_tokens, sentences):
    records = [record(0.5, 0.5, counted=num_tokens, sent=0.5 + lateness)]
    found = warnings_of(summarise(records, Objective(), client_seconds=client_seconds))
    assert len(found) == len(sentences) and all(map(str.__contains__, found, sentences))


def test_open_requests_are_counted_over_time():
    # Two at once from 1 to 2, one from 0 to 1 and from 2 to 4: 6 seconds of open requests in 4.
    summary = summarise([record(0.0, 2.0), record(1.0, 1.0), record(2.0, 2.0)], Objective())
    assert summary.most_open == 2 and summary.mean_open == pytest.approx(5 / 4)


@pytest.mark.parametrize(
    ("objective", "num_kept"),
    [
        (Objective(ttft=0.4), 2),
        (Objective(ttft=0.5), 3),
        (Objective(tpot=0.15), 2),
        (Objective(itl=0.25), 2),
        (Objective(end_to_end=0.7), 2),
        (Objective(ttft=0.4, end_to_end=0.35), 1),
    ],
)
def test_goodput_counts_what_was_served_in_time(objective, num_kept):
    records = [
        record(0.0, 0.5, (0.1, 0.3)),
        record(1.0, 0.3, ()),
        record(2.0, 0.2, (0.1, 0.1)),
        record(3.0, 0.1, (0.1,), error="broken off"),
        record(3.0, error="timeout"),
    ]
    summary = summarise(records, objective)
    assert summary.num_kept == num_kept and summary.kept_share == pytest.approx(num_kept / 5)
    assert summary.goodput == pytest.approx(num_kept / summary.seconds)
