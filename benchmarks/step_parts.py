"""What the steps of a model take, and what each part of them takes: of the layers as they run, of the others alone.

The layers' own clocks tell of their parts; the head, sampling and the host's work are run apart from the step. What
none of them explains is the rest. Knows no limits of the machine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from benchmarks import host_step_cost
from benchmarks.served_model import ServedModel, Step
from kernels.quantized_weight import QuantizedWeight
from kernels.sampling.sampling_batch import SamplingBatch
from models.layers import Linear


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step whose rows are all alike."""

    num_sequences: int
    context: int  # tokens of each that are in the cache once the step has run
    num_new: int  # of these, tokens that the step computes

    @property
    def num_tokens(self) -> int:
        """That the step computes."""
        return self.num_sequences * self.num_new


@dataclass(frozen=True, slots=True)
class StepParts:
    """Median seconds of a step, scheduling, execution and update, and of its parts."""

    step: float
    parts: Mapping[str, float]

    @property
    def rest(self) -> float:
        """What the parts leave of the step; negative where they are slower alone than within it."""
        return self.step - sum(self.parts.values())


def measure_parts(model: ServedModel, shape: StepShape, text: Sequence[int], rounds: int) -> StepParts:
    """Run steps of that shape in the real engine, then what is no part of the layers. Prompts are cut from `text`."""
    steps = steps_of(model, shape, text, rounds)
    parts = {name: median(step.part_seconds[name] for step in steps) for name in steps[0].part_seconds}
    decoder = model.decoder
    hidden = torch.randn(shape.num_sequences, decoder.config.hidden_size)
    logits = decoder.logits(hidden)
    sampling = _sampling(shape.num_sequences)
    parts["head"] = timed(lambda: decoder.logits(hidden), rounds)
    parts["sampling"] = timed(lambda: decoder.ops.sample(logits, sampling), rounds)
    parts["host"] = host_step_cost.measure(shape.num_sequences, shape.context, num_steps=20 * rounds).total
    return StepParts(median(step.seconds for step in steps), parts)


def steps_of(model: ServedModel, shape: StepShape, text: Sequence[int], rounds: int) -> list[Step]:
    """At least `rounds` steps of that shape, as the scheduler comes to them.

    Raises:
        ValueError: it does not, with the settings of this model.
    """
    places = np.random.default_rng(0).permutation(len(text) - shape.context)
    prompts = [text[place : place + shape.context] for place in places[: max(rounds + 1, shape.num_sequences)]]
    if shape.num_new == 1:
        # The first prompts to be computed go on while the others are: those must not end before the last is ready.
        budget = model.config.max_num_batched_tokens or 1
        num_prefills = 2 * -(-shape.num_sequences * shape.context // budget)
        prompts = [prompt[: shape.context - rounds] for prompt in prompts[: shape.num_sequences]]
        steps = model.generate(prompts, num_prefills + 2 * rounds)
    else:  # one that warms up, and then as many as there are rounds
        steps = [step for prompt in prompts[: rounds + 1] for step in model.generate([prompt], 1)][1:]
    wanted = (shape.num_sequences, shape.num_tokens)
    found = [step for step in steps if (step.num_rows, step.num_tokens) == wanted]
    if len(found) < rounds:
        raise ValueError(f"the scheduler makes no steps of {wanted[0]} rows and {wanted[1]} tokens with these settings")
    return found


def layer_products(model: ServedModel) -> list[Linear]:
    """The products of all layers, in their order."""
    return [module for layer in model.decoder.layers for module in layer.modules() if isinstance(module, Linear)]


def weight_bytes(linear: Linear) -> int:
    """Bytes of its weight that a product reads."""
    weight = linear.weight
    return weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes


def timed(action: Callable[[], object], rounds: int) -> float:
    """Median seconds, after one more run that warms up."""
    found = []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            action()
            found.append(time.perf_counter() - begin)
    return median(found[1:])


def _sampling(num_rows: int) -> SamplingBatch:
    """At a temperature of 1, as most requests are."""
    return SamplingBatch(
        temperature=torch.ones(num_rows),
        top_k=torch.zeros(num_rows, dtype=torch.int64),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        uniform=torch.rand(num_rows, dtype=torch.float64),
        all_greedy=False,
    )
