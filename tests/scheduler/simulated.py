"""Small deployments for the tests of the simulator, and a cost that is easy to reckon with."""

from dataclasses import dataclass, replace

from scheduler.config import SchedulerConfig
from scheduler.simulate.deployment import Deployment
from scheduler.simulate.replay import Replay
from scheduler.simulate.report import build_report
from scheduler.simulate.step_cost import NoCost
from scheduler.simulate.traces import Session, Trace, Turn

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=10_000)


@dataclass(frozen=True)
class SecondPerStep:
    """Every step takes a second."""

    def seconds(self, work):
        return 1.0

    def describe(self):
        return "a second"


def deployment(num_blocks=256, block_size=4, cost=SecondPerStep(), num_steps_ahead=0, **changes):
    limits = {name: changes.pop(name) for name in list(changes) if hasattr(CONFIG, name)}
    config = replace(CONFIG, **limits)
    return Deployment(config, cost, num_blocks, block_size, num_steps_ahead=num_steps_ahead, **changes)


def trace_of(*requests):
    """Requests as (arrival, prompt tokens, output tokens)."""
    sessions = tuple(Session(float(at), (Turn(num_prompt, num_output),)) for at, num_prompt, num_output in requests)
    return Trace("test", sessions)


def simulate(trace, deployed):
    """The report of a whole replay, whose books are proved at the end."""
    replay = Replay(trace, deployed)
    replayed = replay.run()
    replay.check_integrity()
    return build_report(trace, deployed, replayed, 0.0)


def unlimited(trace, block_size):
    """A deployment in which each request finds all that came before it."""
    return deployment(
        trace.num_blocks_for_all(block_size),
        block_size,
        cost=NoCost(),
        max_num_batched_tokens=2048,
        max_model_len=200_000,
    )
