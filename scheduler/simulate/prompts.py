"""Makes token ids of what a trace says of a prompt: equal runs become equal tokens, all else differs.

Knows no vocabulary: what is hashed and compared is only whether tokens are the same.
"""

from array import array

from scheduler.simulate.traces import Turn

FILLER = 0
GENERATED = 1  # every sampled token: no prompt holds it, so that an answer is never taken for a part of a prompt
_FIRST_RUN = 2
_LAST = 2**31 - 1


def prompt_token_ids(turn: Turn, tokens_per_run: int, serial: int) -> "array[int]":
    """The prompt of a turn; `serial` is unlike that of any other turn.

    The first token of a run tells it from the others, the rest is filler: blocks further inside are told apart by
    what stands before them. What the runs leave of the prompt begins with a token of this turn alone.
    """
    token_ids = array("i", bytes(4 * turn.num_prompt_tokens))
    num_begun = min(len(turn.run_ids), -(-turn.num_prompt_tokens // tokens_per_run))
    end = num_begun * tokens_per_run
    token_ids[:end:tokens_per_run] = array("i", [_FIRST_RUN + run for run in turn.run_ids[:num_begun]])
    if end < turn.num_prompt_tokens:
        token_ids[end] = _LAST - serial
    return token_ids
