"""A prompt in any of the four forms of OpenAI's API: a text, a list of texts, token ids, a list of such lists.

Knows the shape only: no vocabulary and no window.
"""

from pydantic import WithJsonSchema

from server.protocol.field_types import invalid

MAX_PROMPTS = 2048

Prompt = str | tuple[int, ...]

_STRINGS = {"type": "array", "items": {"type": "string"}}
_INTEGERS = {"type": "array", "items": {"type": "integer"}}
PROMPTS_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, _STRINGS, _INTEGERS, {"type": "array", "items": _INTEGERS}]}
)


def parse_prompts(value: object, name: str) -> tuple[Prompt, ...]:
    """Bring the four forms of the field `name` into one: a tuple of texts and token id tuples."""
    if value is None:
        raise invalid(f"{name} must be given")
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        prompts: list[object] = [value]
    elif isinstance(value, list):
        prompts = value
    else:
        raise invalid(f"{name} must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not prompts:
        raise invalid(f"{name} must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"{name} may hold at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    return tuple(_parse_one(prompt, name) for prompt in prompts)


def _parse_one(prompt: object, name: str) -> Prompt:
    if not isinstance(prompt, str | list):
        raise invalid(f"{name} must hold strings or lists of token ids only")
    if not prompt:
        raise invalid(f"{name} must not be empty")
    if isinstance(prompt, str):
        return prompt
    if not all(type(token_id) is int for token_id in prompt):
        raise invalid(f"{name} must hold token ids only where it is a list of numbers")
    return tuple(prompt)
