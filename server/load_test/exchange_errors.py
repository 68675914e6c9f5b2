"""What can become of a request instead of an answer, by kinds that a report can count. No HTTP here."""


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
