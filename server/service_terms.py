"""How a request wants to be served, apart from what it asks for, and on whose behalf: what the scheduler decides by.

Whose it is comes from the key alone, never from the body. Knows no HTTP and no prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.sampling_params import SamplingParams
from server.errors import InvalidRequest
from server.messages import Submit
from server.protocol.fields import PromptFields
from server.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What the caller asks for."""

    priority: int = 0  # a lower one is served first
    timeout: float | None = None  # seconds from its arrival in which the answer must be complete
    queue_timeout: float | None = None  # seconds from its arrival in which it must begin to run
    cache_salt: str = ""  # shares cached blocks only with requests of the same key that have it too
    reuses_cache: bool = True


@dataclass(frozen=True, slots=True)
class Submitter:
    """Who asks, and what the server's settings allow him at most."""

    tenant: str = ""  # the name of his key; "" where there are no keys
    timeout: float | None = None  # seconds
    queue_timeout: float | None = None
    max_prompts: int = 0  # of one request: as many as may wait; 0 = no limit
    max_prompt_tokens: int = 0  # of several prompts together

    def refuse_too_many(self, prompts: Sequence[Sequence[int]], param: str) -> None:
        """Refuse prompts that would not even find room in an empty queue: sent again, they would fail again.

        Raises:
            InvalidRequest: saying how many may come at once.
        """
        if len(prompts) <= 1:
            return
        if 0 < self.max_prompts < len(prompts):
            raise InvalidRequest(
                f"{param} has {len(prompts)} prompts, and at most {self.max_prompts} may wait on this server "
                "(--max-num-queued-reqs). Send fewer at once.",
                param,
            )
        num_tokens = sum(map(len, prompts))
        if 0 < self.max_prompt_tokens < num_tokens:
            raise InvalidRequest(
                f"The {len(prompts)} prompts have {num_tokens} tokens, and at most {self.max_prompt_tokens} may wait "
                "on this server (--max-num-queued-tokens). Send fewer prompts at once.",
                param,
            )

    def message(
        self, request_id: str, token_ids: TokenIds, params: SamplingParams, terms: ServiceTerms, arrival_time: float
    ) -> Submit:
        """The request as the engine takes it; `arrival_time` is in seconds since the epoch."""
        return Submit(
            request_id,
            token_ids,
            params,
            arrival_time,
            priority=terms.priority,
            tenant=self.tenant,
            cache_salt=terms.cache_salt,
            reuses_cache=terms.reuses_cache,
            queue_deadline=_earlier(arrival_time, self.queue_timeout, terms.queue_timeout),
            deadline=_earlier(arrival_time, self.timeout, terms.timeout),
        )


def terms_of(request: PromptFields) -> ServiceTerms:
    """The terms that a body names."""
    return ServiceTerms(
        priority=request.priority or 0,
        timeout=request.timeout,
        queue_timeout=request.queue_timeout,
        cache_salt=request.cache_salt or "",
        reuses_cache=request.cache_prompt is not False,
    )


def _earlier(arrival_time: float, *seconds: float | None) -> float | None:
    given = [each for each in seconds if each is not None]
    return arrival_time + min(given) if given else None
