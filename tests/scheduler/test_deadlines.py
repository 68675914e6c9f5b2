"""The times that requests came with: whose has come, and that those who have ended leave nothing behind."""

from scheduler.deadlines import Deadlines
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams


def request(number, **times):
    made = Request(f"r{number}", (1,), SamplingParams(max_tokens=1), 0.0, **times)
    made.first_seq_id = number
    return made


def test_each_time_comes_once_in_order():
    unfinished = {}
    deadlines = Deadlines(unfinished)
    for number, times in enumerate(({"deadline": 5.0}, {"queue_deadline": 3.0, "deadline": 9.0}, {})):
        unfinished[f"r{number}"] = request(number, **times)
        deadlines.watch(unfinished[f"r{number}"])
    assert deadlines.due(2.9) == []
    assert deadlines.due(5.0) == [("r1", 1, True), ("r0", 0, False)]
    assert deadlines.due(5.0) == []
    assert deadlines.due(99.0) == [("r1", 1, False)]


def test_the_times_of_requests_that_have_ended_do_not_pile_up():
    unfinished = {}
    deadlines = Deadlines(unfinished)
    unfinished["r0"] = request(0, deadline=7e5)
    deadlines.watch(unfinished["r0"])
    for number in range(1, 2000):
        unfinished[f"r{number}"] = request(number, queue_deadline=6e5, deadline=6e5)
        deadlines.watch(unfinished[f"r{number}"])
        del unfinished[f"r{number}"]
        assert len(deadlines) < 100
    assert deadlines.due(7e5)[-1] == ("r0", 0, False)
