"""What can become of a request instead of an answer, by kinds that a report can count. No HTTP here."""

import json


class ExchangeFailed(Exception):
    """No whole answer came.

    Kinds: `connect` (nobody listens, or TLS failed), `timeout`, `broken off` (the connection ended before the answer
    did), `http STATUS`, `error event` (the stream itself reported an error), `bad answer` (not what OpenAI's API
    answers), `no tokens` (a whole answer without any).
    """

    def __init__(self, kind: str, message: str) -> None:
        """`message` is for a person who reads one example of the kind."""
        super().__init__(message)
        self.kind = kind
        self.message = message


def error_text(body: bytes) -> str:
    """What the body of an answer says of its error, shortened for one line."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass  # not JSON: shown as it is
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."
