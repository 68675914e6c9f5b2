"""The scheduler's door: refuses what could never run, so that whatever is queued ends. Changes nothing."""

from paged_cache.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.request import Request


class RequestRefused(ValueError):
    """A request that this engine can never serve; `param` names the field at fault."""

    http_status = 400

    def __init__(self, message: str, param: str) -> None:
        """Say for a person what does not fit, and which field to change."""
        super().__init__(message)
        self.param = param


def refuse_unservable(request: Request, config: SchedulerConfig, manager: BlockManager) -> None:
    """Check a request against the limits of a sequence and an empty pool.

    Raises:
        RequestRefused: if one of its sequences could not reach `max_tokens` even alone.
    """
    num_prompt = len(request.prompt_token_ids)
    num_most = num_prompt + request.params.max_tokens
    if num_prompt == 0:
        raise RequestRefused("The prompt has no tokens.", "prompt")
    if request.params.pooling is not None and (request.params.n, request.params.max_tokens) != (1, 0):
        raise RequestRefused("Hidden states are pooled for requests with n 1 and max_tokens 0.", "n")
    if num_most > config.max_model_len:
        raise RequestRefused(
            f"The prompt's {num_prompt} tokens and max_tokens {request.params.max_tokens} exceed the "
            f"{config.max_model_len} tokens that a sequence may have.",
            "max_tokens",
        )
    if manager.num_blocks_for(num_most) > manager.num_blocks:
        raise RequestRefused(
            f"The prompt's {num_prompt} tokens and max_tokens {request.params.max_tokens} need "
            f"{manager.num_blocks_for(num_most)} KV blocks; the whole cache has {manager.num_blocks}.",
            "max_tokens",
        )
