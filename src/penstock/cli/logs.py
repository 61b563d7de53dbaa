"""The log that a process writes to standard error, with never a credential in it."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from penstock.observe.redaction import RedactCredentials

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

log = logging.getLogger("penstock")


def configure_logs(level: str) -> None:
    """All that is logged goes through one output, and that is redacted."""
    logging.basicConfig(level=level.upper(), format=_FORMAT, stream=sys.stderr)
    if level.upper() != "DEBUG":
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request of a download, with signed URLs
    for output in logging.getLogger().handlers:
        if not any(isinstance(one, RedactCredentials) for one in output.filters):
            output.addFilter(RedactCredentials())


def log_the_uncaught() -> None:
    """Logs what Python would write past the log: warnings, and errors that nobody caught, in any thread."""
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda seen: _uncaught(seen.exc_type, seen.exc_value, seen.exc_traceback)


def write_lines_bare(name: str) -> None:
    """The output of a logger whose messages are whole lines with times of their own."""
    output = logging.StreamHandler(sys.stderr)
    output.addFilter(RedactCredentials())
    logger = logging.getLogger(name)
    logger.handlers = [output]
    logger.propagate = False


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    log.critical("this should not have happened", exc_info=(kind, error or kind(), trace))
