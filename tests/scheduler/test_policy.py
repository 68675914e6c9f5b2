"""Who gives way: a table of cases."""

from types import SimpleNamespace

from scheduler.policy import choose_victim, resume_order


def sequence(seq_id, num_computed_tokens=10, num_preemptions=0, arrival_time=0.0):
    request = SimpleNamespace(arrival_time=arrival_time)
    return SimpleNamespace(
        seq_id=seq_id, num_computed_tokens=num_computed_tokens, num_preemptions=num_preemptions, request=request
    )


def victim_id(*sequences, max_preemptions=2):
    return choose_victim(sequences, max_preemptions).seq_id


def test_the_least_computed_work_is_thrown_away():
    assert victim_id(sequence(1, 30), sequence(2, 5), sequence(3, 20)) == 2


def test_of_equals_the_latest_arrival_gives_way():
    assert victim_id(sequence(1, arrival_time=1.0), sequence(2, arrival_time=3.0), sequence(3, arrival_time=2.0)) == 2
    assert victim_id(sequence(1), sequence(2)) == 2


def test_who_was_preempted_often_is_spared_while_another_is_left():
    assert victim_id(sequence(1, 5, num_preemptions=2), sequence(2, 500, num_preemptions=1)) == 2
    assert victim_id(sequence(1, 5, num_preemptions=2), sequence(2, 500, num_preemptions=9)) == 1


def test_the_earliest_arrival_is_resumed_first():
    waiting = [sequence(1, arrival_time=2.0), sequence(3, arrival_time=1.0), sequence(2, arrival_time=1.0)]
    assert [s.seq_id for s in sorted(waiting, key=resume_order)] == [2, 3, 1]
