"""Where the log of a process goes and what a line looks like: for people, or one JSON object each for collectors.

Called once by each process. Knows no setting but the two that it is given.
"""

import json
import logging
import logging.config
import sys
import threading
import time
import warnings
from typing import Any

import msgspec

from server.log_lines import LogLine, current_request

CONSOLE = "octavo.console"  # the logger of what the person who starts the server reads, whatever the level

logger = logging.getLogger("octavo.process")


def configure_logging(level: str, log_format: str = "human", process: str = "server") -> None:
    """Send log lines of `level` and above to stderr, warnings and exceptions that nobody catches among them.

    `log_format` is human or json; `process` is the name that JSON lines give to this process.
    """
    # What no line shows is not asked for: each line takes half the time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    is_json = log_format == "json"
    formatters: dict[str, dict[str, Any]] = {
        "line": {"()": JsonFormatter, "process": process} if is_json else {"()": HumanFormatter},
        "bare": {"()": JsonFormatter, "process": process} if is_json else {"format": "%(message)s"},
    }
    handlers = {
        name: {"class": "logging.StreamHandler", "formatter": name, "stream": "ext://sys.stderr"} for name in formatters
    }
    loggers = {
        "octavo": {"level": level.upper()},
        CONSOLE: {"level": "INFO", "handlers": ["bare"], "propagate": False},
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": formatters,
            "handlers": handlers,
            "root": {"level": "WARNING", "handlers": ["line"]},
            "loggers": loggers,
        }
    )
    _log_what_nobody_catches()


class _Clock:
    """Writes times; those of the same second share most of the work."""

    def __init__(self, pattern: str, *, is_utc: bool) -> None:
        self._pattern = pattern
        self._is_utc = is_utc
        self._last = (-1, "")  # replaced as a whole: threads write lines too

    def text(self, seconds: int) -> str:
        """A time in whole seconds since the epoch."""
        last, text = self._last
        if last != seconds:
            text = time.strftime(self._pattern, time.gmtime(seconds) if self._is_utc else time.localtime(seconds))
            self._last = (seconds, text)
        return text


class HumanFormatter(logging.Formatter):
    """Time, level, logger and sentence, and the request if it belongs to one.

    Whatever has line breaks, such as a stack trace, goes on in lines that are indented, with control characters
    escaped: no request can bring words that pass for a line of their own.
    """

    def __init__(self) -> None:
        """Times are local, with their distance to UTC."""
        super().__init__()
        self._clock = _Clock("%Y-%m-%dT%H:%M:%S%z", is_utc=False)

    def usesTime(self) -> bool:  # noqa: N802  # logging's name
        """It is written here, where it costs less."""
        return False

    def format(self, record: logging.LogRecord) -> str:
        """The line, and those that go on with it."""
        text = super().format(record)
        return text if text.isprintable() else "\n    ".join(map(_printable, text.splitlines()))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """The line without a stack trace."""
        line = f"{self._clock.text(int(record.created))} {record.levelname} {record.name}: {record.message}"
        if isinstance(record.msg, LogLine):  # its text says whose it is
            return line
        request = current_request.get()
        return line if request is None else f"{line} id={request.request_id}"


class JsonFormatter(logging.Formatter):
    """One JSON object on one line, whatever the message holds."""

    def __init__(self, process: str) -> None:
        """`process` stands in each line."""
        super().__init__()
        self._process = process
        self._clock = _Clock("%Y-%m-%dT%H:%M:%S", is_utc=True)
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds, fraction = divmod(record.created, 1)
        line: dict[str, object] = {
            "time": f"{self._clock.text(int(seconds))}.{int(1000 * fraction):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
        }
        if isinstance(record.msg, LogLine):
            line["message"] = record.msg.message
        else:
            line["message"] = record.getMessage()
        request = current_request.get()
        if request is not None:
            line |= {"request_id": request.request_id, **request.trace_fields()}
        if isinstance(record.msg, LogLine):
            line.update(record.msg.fields)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["exception"] = f"{type(error).__name__}: {error}"
            line["stack_trace"] = self.formatException(record.exc_info)
        elif record.stack_info:
            line["stack_trace"] = record.stack_info
        try:
            return self._encoder.encode(line).decode()
        except (UnicodeError, OverflowError, TypeError):  # half a character of two, a huge number
            return json.dumps(line, default=str)


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def _log_what_nobody_catches() -> None:
    """Else Python writes it to stderr by itself, as lines that no collector can read."""

    def log_end(kind: type[BaseException], error: BaseException, trace: Any) -> None:  # noqa: ANN401
        if issubclass(kind, Exception):
            logger.critical("The process ends by an error that nobody foresaw.", exc_info=(kind, error, trace))
        else:
            sys.__excepthook__(kind, error, trace)  # Control-C, and an exit, are none

    def log_thread_end(given: threading.ExceptHookArgs) -> None:
        if issubclass(given.exc_type, Exception) and given.exc_value is not None:
            name = "?" if given.thread is None else given.thread.name
            error = (given.exc_type, given.exc_value, given.exc_traceback)
            logger.error("The thread %s ends by an error that nobody foresaw.", name, exc_info=error)

    def log_ignored(given: "sys.UnraisableHookArgs") -> None:
        error = (given.exc_type, given.exc_value, given.exc_traceback)
        logger.error("%s: %r", given.err_msg or "Exception ignored in", given.object, exc_info=error)  # type: ignore[arg-type]

    sys.excepthook, threading.excepthook, sys.unraisablehook = log_end, log_thread_end, log_ignored
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{filename}:{lineno}: {category.__name__}: {message}"
