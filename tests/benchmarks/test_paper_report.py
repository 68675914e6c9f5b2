"""The page about the paper says what the result says, number by number."""

import json

from benchmarks.machine import RESULTS_DIR, ROOT
from benchmarks.paper_report import report

RESULT = RESULTS_DIR / "paper.json"
PAGE = ROOT / "docs" / "paper.md"


def test_the_page_is_the_one_that_the_result_makes():
    assert PAGE.exists() == RESULT.exists(), "benchmarks/paper.py writes both"
    if RESULT.exists():
        result = json.loads(RESULT.read_text(encoding="utf-8"))
        assert PAGE.read_text(encoding="utf-8") == report(result)
