"""The scheduler's benchmark measures what it says: so many run, so many wait, in every timed step."""

from benchmarks.scheduler_cost import StepCost, measure


def test_all_that_should_run_decode_in_every_step_while_the_others_wait():
    cost = measure(num_running=4, num_waiting=6, num_tenants=3, context=8, num_steps=40)
    assert (cost.num_running, cost.num_waiting, cost.num_steps) == (4, 6, 39)
    assert 0 < cost.total <= cost.most
    assert cost.schedule < cost.total and cost.update < cost.total


def test_microseconds_are_of_one_sequence():
    cost = StepCost(256, 0, 1, 10, schedule=1e-4, update=1e-4, total=2e-4, mean=2.56e-4, most=1e-3)
    assert cost.microseconds_per_sequence == 1.0
