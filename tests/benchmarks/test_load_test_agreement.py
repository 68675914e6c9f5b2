"""The comparison of two clients, on a quick server: both see the whole load, and the verdict follows the ratios."""

import pytest

from benchmarks import load_test_agreement as agreement
from benchmarks.load_test_agreement import (
    BEHIND_SECONDS,
    NAMES,
    LoadShape,
    compare,
    load_test,
    make_loads,
    other_client,
    started,
    to_table,
    write_rows,
)


def test_both_clients_measure_the_paced_server(monkeypatch, tmp_path):
    monkeypatch.setattr(agreement, "PACE_SECONDS", 0.01)
    ours, others = make_loads(LoadShape(5, 50.0, 6, 3))
    with started("paced") as url:
        compared = compare(load_test(url, write_rows(tmp_path / "rows.jsonl", ours)), other_client(url, others))
    for name, row in compared.items():
        least = {"first token": 0.01, "whole answer": 0.03}.get(name, 0.0)  # a late piece makes the next gap short
        assert row["load_test"] > least and row["other_client"] > least


def test_ratios_are_told():
    compared = compare(dict.fromkeys(NAMES, 1.03), dict.fromkeys(NAMES, 1.0))
    assert {row["ratio"] for row in compared.values()} == {1.03}
    assert to_table(compared).splitlines()[-1].endswith("| 1030.00 | 1000.00 | 1.030 |")


@pytest.mark.parametrize(("ratio", "is_agreed"), [(1.029, True), (0.971, True), (1.031, False), (0.969, False)])
def test_three_percent_is_the_limit_for_each(monkeypatch, capsys, ratio, is_agreed):
    monkeypatch.setattr(agreement, "load_test", lambda *_: {**dict.fromkeys(NAMES, 1.0), NAMES[2]: ratio})
    monkeypatch.setattr(agreement, "other_client", lambda *_: dict.fromkeys(NAMES, 1.0))
    assert agreement.measure("paced")["is_agreed"] is is_agreed
    assert ("the two agree" in capsys.readouterr().out) is is_agreed


def test_both_send_the_same_and_each_comes_first_in_half_of_the_pairs():
    shape = LoadShape(20, 4.0, 10, 7)
    ours, others = make_loads(shape)
    assert (ours, others) == make_loads(shape) and len({row["prompt"] for row in ours}) == 20
    assert [row["prompt"] for row in ours] == [row["prompt"] for row in others]
    leads = [other["at"] - our["at"] for our, other in zip(ours, others, strict=True)]
    assert leads == pytest.approx([BEHIND_SECONDS, -BEHIND_SECONDS] * 10)
