"""Who gives way: a table of cases."""

from types import SimpleNamespace

from scheduler.policy import choose_victim, serving_order


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


def waiting(seq_id, arrival_time, priority=0, first=None, index=0):
    request = SimpleNamespace(arrival_time=arrival_time, priority=priority)
    made = SimpleNamespace(seq_id=seq_id, index=index, request=request)
    request.sequences = [first or made]
    return made


def test_the_lowest_priority_number_goes_first_then_the_earliest_arrival_then_who_was_added_first():
    first = waiting(4, 2.0)
    queue = [waiting(1, 3.0), waiting(2, 5.0, priority=-1), waiting(3, 1.0, priority=1), first, waiting(5, 2.0)]
    queue += [waiting(7, 2.0, first=first, index=2), waiting(6, 2.0, first=first, index=1)]
    assert [s.seq_id for s in sorted(queue, key=serving_order)] == [2, 4, 6, 7, 5, 1, 3]
