"""The page about Octavo's peers says what the result says."""

import json

from benchmarks.machine import RESULTS_DIR, ROOT
from benchmarks.peer_report import report

RESULT = RESULTS_DIR / "peers.json"
PAGE = ROOT / "docs" / "peers.md"


def test_the_page_is_the_one_that_the_result_makes():
    assert PAGE.exists() == RESULT.exists(), "benchmarks/peers.py writes both"
    if RESULT.exists():
        assert PAGE.read_text(encoding="utf-8") == report(json.loads(RESULT.read_text(encoding="utf-8")))
