"""The engine's own small duties; its steps are tested through its process and through HTTP."""

import logging
from dataclasses import fields
from types import SimpleNamespace

from scheduler.stats import SchedulerStats
from server.engine import Engine


def failing_check():
    raise AssertionError("block 3 counts 1 references, 0 block tables hold it")


def test_a_pool_that_is_not_whole_is_reported_and_counted_and_serving_goes_on(caplog):
    stats = SchedulerStats(*[0] * len(fields(SchedulerStats)))
    engine = Engine(SimpleNamespace(check_integrity=failing_check, stats=stats), runner=None, info=None)
    with caplog.at_level(logging.ERROR):
        engine.check_integrity()
    assert engine.stats.num_integrity_failures == 1
    assert "block 3 counts 1 references" in caplog.text
