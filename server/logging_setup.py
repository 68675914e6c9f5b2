"""Where the server's log goes and what a line looks like. Called once, by the command."""

import logging
import logging.config


def configure_logging(level: str) -> None:
    """Send log lines of `level` and above to stderr."""
    # What no line shows is not asked for: each line takes half the time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s", "datefmt": "%Y-%m-%dT%H:%M:%S%z"}
            },
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
            },
            "root": {"level": "WARNING", "handlers": ["stderr"]},
            "loggers": {"octavo": {"level": level.upper()}},
        }
    )
