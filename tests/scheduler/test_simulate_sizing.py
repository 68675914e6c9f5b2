"""The search for the least number of replicas, and what counts as a miss."""

import pytest

from scheduler.simulate.measurements import Measurements
from scheduler.simulate.sizing import MissCounter, Objective, Trial, size, try_replicas
from tests.scheduler.simulated import deployment, simulate, trace_of

REPORT = simulate(trace_of((0.0, 4, 1)), deployment())


@pytest.mark.parametrize("needed", range(1, 21))
@pytest.mark.parametrize("most", [1, 7, 20, 64])
def test_the_least_number_is_found_without_trying_all(needed, most):
    found = size(lambda n: Trial(n, n >= needed, True, REPORT), Objective(99.0, 1.0), most)
    tried = [trial.num_replicas for trial in found.trials]
    assert len(tried) == len(set(tried)) <= 10
    assert max(tried) <= most
    if needed > most:
        assert found.num_replicas is None and found.chosen is None and most in tried
    else:
        assert found.num_replicas == needed and found.chosen is REPORT
        assert {needed, needed - 1} - {0} <= set(tried)


def test_late_and_unanswered_requests_miss_the_objective():
    objective = Objective(90.0, ttft=1.0)
    assert objective.num_allowed_misses(20) == 2
    is_out_of_reach = MissCounter(objective, 20)
    measured = Measurements(ttft=[0.5] * 9 + [1.0, 1.5])
    assert not is_out_of_reach(measured)
    measured.ttft += [0.5] * 8 + [2.0]
    assert not is_out_of_reach(measured)
    measured.drops["queue_full"] += 1
    assert is_out_of_reach(measured)
    assert not MissCounter(Objective(90.0), 20)(Measurements(ttft=[9.0] * 20))


def test_a_hopeless_trial_is_given_up_and_one_that_suffices_is_not():
    # A step a second and 8 at once: 40 answers of 10 tokens take 50 s on one replica.
    trace = trace_of(*((0.0, 4, 10) for _ in range(40)))
    objective = Objective(90.0, ttft=5.0, inter_token=1.0)
    one = try_replicas(trace, deployment(), objective, 1)
    assert (one.is_met, one.is_complete) == (False, False)
    assert one.report.num_answered < 40
    enough = try_replicas(trace, deployment(), objective, 5)
    assert (enough.is_met, enough.is_complete, enough.report.num_answered) == (True, True, 40)
    found = size(lambda n: try_replicas(trace, deployment(), objective, n), objective, 64)
    assert found.num_replicas == 5


def test_gaps_between_tokens_count_too():
    trace = trace_of((0.0, 4, 10))
    trial = try_replicas(trace, deployment(), Objective(99.0, inter_token=0.5), 3)
    assert (trial.is_met, trial.is_complete) == (False, True)
    assert try_replicas(trace, deployment(), Objective(99.0, inter_token=1.0), 1).is_met
