"""What can go wrong with the engine or with a request in it, as those see it who ask the engine client."""

from scheduler.output import DropCause


class EngineStartError(RuntimeError):
    """The engine did not come up; the message is for the person who started the server."""


class EngineRefusedSettings(EngineStartError):
    """It did not because of the model or the settings that it was given."""


class EngineUnavailable(RuntimeError):
    """Not now: the engine is down or starting, the server drains, or the engine lacks what the request takes."""


class EngineDied(RuntimeError):
    """The engine process ended while this request was open."""


class RequestRejected(ValueError):
    """The scheduler refused the request; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None) -> None:
        """Carry the scheduler's words."""
        super().__init__(message)
        self.param = param


class RequestDropped(RuntimeError):
    """The scheduler had no room or no time for the request, with which nothing is wrong."""

    def __init__(self, message: str, cause: DropCause, retry_after: float | None) -> None:
        """`retry_after`: seconds after which there should be room; None where nobody knows."""
        super().__init__(message)
        self.cause = cause
        self.retry_after = retry_after
