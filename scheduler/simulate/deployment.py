"""What is simulated: the limits of one engine, its cache, its cost of a step, and how many of them serve.

Frozen values. Builds nothing and runs nothing.
"""

from dataclasses import dataclass
from typing import Literal

from scheduler.config import SchedulerConfig
from scheduler.simulate.step_cost import StepCost

RouterName = Literal["round-robin", "least-loaded", "prefix-aware"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """Replicas of one engine behind a router."""

    config: SchedulerConfig
    cost: StepCost
    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True
    num_steps_ahead: int = 1  # 1 = the next step is scheduled while one runs, as the engine does on a GPU
    num_replicas: int = 1
    num_cards: int = 1  # of one replica
    router: RouterName = "round-robin"
    queue_timeout: float | None = None  # seconds that every request allows itself to wait, and to take
    timeout: float | None = None

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence."""
        return min(self.config.max_model_len, self.num_blocks * self.block_size)
