"""The comparison of two clients, on a quick server: both see the whole load, and the verdict follows the ratios."""

import pytest

from benchmarks import load_test_agreement as agreement
from benchmarks.load_test_agreement import LoadShape, compare, make_load, measure, to_table


def test_both_clients_measure_the_paced_server(monkeypatch, capsys):
    monkeypatch.setattr(agreement, "PACE_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "LOADS", {"paced": LoadShape(5, 50.0, 6, 3)})
    result = measure("paced", 1)
    assert result["medians"].keys() == set(agreement.NAMES)
    for name, row in result["medians"].items():
        least = {"first token": 0.01, "whole answer": 0.03}.get(name, 0.0)  # a late piece makes the next gap short
        assert row["load_test"][0] > least and row["other_client"][0] > least
    assert "| first token |" in capsys.readouterr().out


@pytest.mark.parametrize(("ours", "others", "ratio"), [([1.0, 4.0, 2.0], [2.0, 2.0, 2.0], 1.0), ([1.03], [1.0], 1.03)])
def test_rounds_are_compared_one_by_one(ours, others, ratio):
    row = compare(ours, others)
    assert row["ratio"] == pytest.approx(ratio)
    assert to_table({"x": row}).splitlines()[-1].endswith(f"| {ratio:.3f} |")


def test_the_load_is_the_same_each_time():
    shape = LoadShape(20, 4.0, 10, 7)
    rows = make_load(shape)
    assert rows == make_load(shape) and len({row["prompt"] for row in rows}) == 20
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows) and rows[0]["at"] == 0.0
