"""What a session sends next: a prompt of its own, or in a conversation all that was said and what comes now.

Knows no time and no connection.
"""

from server.load_test.plan import PlannedSession, Prompt
from server.load_test.request_form import RequestForm


class Talk:
    """One session as it goes on."""

    def __init__(self, form: RequestForm, session: PlannedSession) -> None:
        """Nothing is said yet."""
        self._form = form
        self._session = session
        self._said: Prompt | None = None  # up to the last prompt
        self._answer = ""

    def body(self, turn: int) -> bytes:
        """The request of a turn; each is asked for once, in their order. The first may have been made elsewhere."""
        request = self._session.requests[turn]
        return self._form.body(self._prompt(turn), request.max_tokens)

    def hear(self, answer: str) -> None:
        """Take in what the server said."""
        self._answer = answer

    def _prompt(self, turn: int) -> Prompt:
        prompt = self._session.requests[turn].make_prompt()
        if not self._session.is_conversation:
            return prompt
        if turn:
            said = self._session.requests[0].make_prompt() if self._said is None else self._said
            prompt = self._form.continued(said, self._answer, prompt)
        self._said = prompt
        return prompt
