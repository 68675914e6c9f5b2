"""The examples of OpenAI's own API description, sent as they stand but for the model's name.

Each is answered with all that OpenAI's answer has, or refused by the name of what this server cannot do. Knows only
how to read an answer: whoever replays them brings the server.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.clients.calls import Target
from tests.data_files import openai_examples

# (path, title) -> what is refused: the status and the beginning of `param`. All others are answered.
REFUSED: dict[tuple[str, str], tuple[int, str | None]] = {
    ("/chat/completions", "Image input"): (400, "messages[0].content"),
    ("/models/{model}", "Delete a fine-tuned model"): (405, None),
    ("/responses", "Image input"): (400, "input[0].content"),
    ("/responses", "File input"): (400, "input[0].content"),
    ("/responses", "Web search"): (400, "tools[0]"),
    ("/responses", "File search"): (400, "tools[0]"),
    ("/responses", "Reasoning"): (400, "reasoning.effort"),  # where the model's template knows none
    # Nothing is stored here, so there is nothing to be had again.
    ("/responses/{response_id}", "Get a model response"): (404, None),
    ("/responses/{response_id}", "Delete a model response"): (404, None),
    ("/responses/{response_id}/input_items", "List input items"): (404, None),
    ("/responses/{response_id}/cancel", "Cancel a response"): (404, None),
}
MAX_TOKENS = 256
_LIMITS = {"/chat/completions": "max_tokens", "/responses": "max_output_tokens"}
# Optional keys of answers: of hosted services, and of a model that decided to call a tool.
ABSENT = {"annotations", "service_tier", "shutdown_date", "tool_calls"}


@dataclass(frozen=True, slots=True)
class Example:
    """One request of the description."""

    path: str
    title: str
    method: str
    url: str  # from /v1 on
    body: dict[str, Any] | None
    answer: str

    @property
    def expected(self) -> tuple[int, str | None]:
        """Status and the beginning of `param`."""
        return REFUSED.get((self.path, self.title), (200, None))


def read_examples(model: str) -> list[Example]:
    """All of them, for a server that serves `model`."""
    return [_read(row, model) for row in openai_examples()]


def _read(row: dict[str, str], model: str) -> Example:
    words = [word.strip() for word in shlex.split(row["curl"])]
    [url] = [word for word in words if word.startswith("https://")]
    [body] = [json.loads(word) for word in words if word.startswith("{")] or [None]
    if body is not None:
        body["model"] = model
    url = url.removeprefix("https://api.openai.com").replace("VAR_chat_model_id", model)
    return Example(row["path"], row["title"], row["method"].upper(), url, body, row["response"])


def check_answer(example: Example, response: httpx.Response) -> None:
    """It has the status and everything that OpenAI's answer has."""
    status, param = example.expected
    assert response.status_code == status, f"{example.path}, {example.title}: {response.status_code} {response.text}"
    assert "x-octavo-ignored-fields" not in response.headers
    if status != 200:
        assert (response.json()["error"]["param"] or "").startswith(param or ""), response.text
        return
    if example.body is not None and example.body.get("stream"):
        _check_stream(example, response)
        return
    try:
        theirs = json.loads(example.answer)
    except ValueError:
        return  # it has elisions
    missing = list(missing_keys(response.json(), theirs))
    assert not missing, f"{example.path}, {example.title}: no {missing}"


def _check_stream(example: Example, response: httpx.Response) -> None:
    """Every event that the example shows comes, in its order and with its keys."""
    ours = [_data_of(event) for event in response.text.removesuffix("\n\n").split("\n\n")]
    assert (ours[-1] is None) == (example.path != "/responses")  # [DONE] ends the others
    theirs = [_data_of(event) for event in example.answer.split("\n\n") if event.strip(" .\n")]
    remaining = [event for event in ours if event is not None]
    for event in theirs:
        if event is None:
            continue
        kind = event.get("type")
        position = next(i for i, our in enumerate(remaining) if our.get("type") == kind)
        missing = [key for key in missing_keys(remaining[position], event) if not key.endswith("delta.content")]
        assert not missing, f"{example.path}, {example.title}: no {missing} in {remaining[position]}"
        remaining = remaining[position:]


def _data_of(event: str) -> dict[str, Any] | None:
    """The object of an event; None for [DONE], or for one that the description shows with a mistake in it."""
    try:
        return json.loads(event[event.index("{") :])
    except ValueError:
        return None


def missing_keys(ours: object, theirs: object, path: str = "") -> list[str]:
    """Paths of what `theirs` has and `ours` does not; items of lists are compared where they are of one type."""
    if isinstance(theirs, list) and isinstance(ours, list):
        pairs = zip(ours[:1], theirs[:1], strict=False)
        return [key for our, their in pairs if _alike(our, their) for key in missing_keys(our, their, f"{path}[0]")]
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return []
    missing = [f"{path}.{key}" for key in theirs if key not in ours and key not in ABSENT]
    for key in theirs.keys() & ours.keys():
        missing += missing_keys(ours[key], theirs[key], f"{path}.{key}")
    return missing


def _alike(ours: object, theirs: object) -> bool:
    return isinstance(ours, dict) and isinstance(theirs, dict) and ours.get("type") == theirs.get("type")


def replay(model: str, send: Callable[[Example], httpx.Response]) -> int:
    """Send every example and check its answer; the number of them."""
    examples = read_examples(model)
    for example in examples:
        check_answer(example, send(example))
    return len(examples)


def replay_examples(target: Target) -> str:
    """Against a server, whose model might talk for as long as its window is wide."""
    with httpx.Client(base_url=target.url, timeout=300) as client:

        def send(example: Example) -> httpx.Response:
            body = example.body
            if example.path in _LIMITS:
                body = {_LIMITS[example.path]: MAX_TOKENS, "temperature": 0, **body}
            return client.request(example.method, example.url, json=body)

        number = replay(target.model, send)
    return f"{number} examples"
