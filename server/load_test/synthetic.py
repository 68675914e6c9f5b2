"""Sessions that are made up: prompts and answers of drawn lengths, shared prefixes, several turns.

Knows no time: when sessions start is decided elsewhere.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from server.load_test.lengths import Lengths
from server.load_test.plan import PlannedRequest, PlannedSession
from server.load_test.prompt_maker import PromptMaker


@dataclass(frozen=True, slots=True)
class Synthetic:
    """What sessions are like. Lengths are in tokens."""

    input_tokens: Lengths  # of a prompt without its prefix; of what each further turn adds
    output_tokens: Lengths
    num_turns: Lengths
    think_time: float = 0.0  # seconds between an answer and what is asked next
    num_prefix_tokens: int = 0  # with which prompts begin
    num_prefixes: int = 1  # different ones, chosen evenly


def synthetic_sessions(spec: Synthetic, maker: PromptMaker) -> Iterator[PlannedSession]:
    """Sessions without end, all starting at 0; the same for the same seed of `maker`."""
    chance = random.Random(f"{maker.seed} lengths")  # noqa: S311  # no secrets here
    number = 0
    while True:
        prefix = chance.randrange(spec.num_prefixes)
        num_turns = spec.num_turns.draw(chance)
        requests = []
        for turn in range(num_turns):
            num_tokens, max_tokens = spec.input_tokens.draw(chance), spec.output_tokens.draw(chance)
            name = f"{number}.{turn}"
            if turn:
                make = partial(maker.added, num_tokens, name)
            elif spec.num_prefix_tokens:
                make = partial(maker.after_prefix, f"prefix {prefix}", spec.num_prefix_tokens, num_tokens, name)
            else:
                make = partial(maker.whole, num_tokens, name)
            requests.append(PlannedRequest(make, max_tokens, spec.think_time))
        yield PlannedSession(0.0, tuple(requests), is_conversation=num_turns > 1)
        number += 1
