"""What other APIs' requests for an answer have in common: bodies made of parts, which are answered as chats are.

As for all bodies: known and unsupported is refused, unknown is reported, null is absent. Knows no API in particular.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from server.errors import InvalidRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import RequestFields, bounded_names, refuse_non_neutral

# Fields of chats that other APIs do not know and that mean the same there.
SAMPLING_FIELDS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "cache_prompt",
        "cache_salt",
        "chat_template_kwargs",
        "documents",
        "frequency_penalty",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "queue_timeout",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "structured_outputs",
        "timeout",
        "top_k",
        "truncate_prompt_tokens",
    }
)


class Part(BaseModel):
    """An object inside a body, such as a message or a tool."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
    # Fields that would change the answer and are not supported -> the values at which they change nothing.
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()  # labels and hints


PartAt = tuple[str, Part]  # the path to it, and itself


class TranslatedRequest(RequestFields):
    """A body that is answered as the chat that is made from it."""

    without_effect: ClassVar[frozenset[str]] = frozenset()  # labels and hints
    borrowed: ClassVar[frozenset[str]] = SAMPLING_FIELDS  # taken over into the chat as they are

    def parts(self) -> Iterator[PartAt]:
        """Every object in the body."""
        yield from ()

    def borrowed_fields(self) -> dict[str, Any]:
        """What only chats know, as it stands in the body."""
        return {name: value for name, value in (self.model_extra or {}).items() if name in self.borrowed}

    def refuse_unsupported(self) -> None:
        """Refuse what this server knows and cannot do, or knows from chats only. Raises InvalidRequest."""
        super().refuse_unsupported()
        for path, part in self.parts():
            refuse_non_neutral(part, part.neutral, f"{path}.")
        for name in self._unread() & _chat_fields():
            if (self.model_extra or {})[name] is not None:
                raise InvalidRequest(f"{name} is not a field of this API.", name)

    def ignored_fields(self) -> list[str]:
        """Paths of the fields that nobody knows."""
        names = sorted(self._unread() - _chat_fields())
        for path, part in self.parts():
            known = part.neutral.keys() | part.without_effect
            names += [f"{path}.{name}" for name in part.model_extra or {} if name not in known]
        return bounded_names(names)

    def _unread(self) -> frozenset[str]:
        read = self.neutral.keys() | self.without_effect | self.borrowed
        return frozenset((self.model_extra or {}).keys() - read)


def _chat_fields() -> frozenset[str]:
    return frozenset(ChatCompletionRequest.model_fields.keys() | ChatCompletionRequest.neutral.keys())
