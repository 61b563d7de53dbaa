"""The liveness of a server by what it answers: whether it is there, starts, or is overloaded. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from penstock.dialects.dialect import Dialect

_UNKNOWN_PATH = (404, 405, 501)
_NO_KEY = 401


class Answer(NamedTuple):
    status: int
    headers: Mapping[bytes, bytes] = {}  # names in lower case
    body: bytes = b""


class Liveness(enum.StrEnum):
    READY = "ready"
    STARTING = "starting"  # it will be there; nothing is wrong
    FAILING = "failing"  # it answers, and not well; or not in time
    GONE = "gone"  # nobody listens: its process is dead, or has not begun to listen


def liveness(dialect: Dialect, answer: Answer | None, *, is_refused: bool, was_ready: bool) -> Liveness:
    """Returns the liveness by the answer to the health path. None: there was none."""
    if answer is None:
        return Liveness.GONE if is_refused else Liveness.FAILING
    if answer.status < 300 or answer.status in (*_UNKNOWN_PATH, 429):
        return Liveness.READY
    if answer.status == 503 and _is_starting(dialect, answer, was_ready):
        return Liveness.STARTING
    return Liveness.FAILING if answer.status >= 500 or answer.status == _NO_KEY else Liveness.READY


def _is_starting(dialect: Dialect, answer: Answer, was_ready: bool) -> bool:
    health = dialect.health
    if health.starting_header is not None:
        name, value = health.starting_header
        return answer.headers.get(name) == value
    if health.starting_text is not None and health.starting_text in answer.body:
        return True
    return health.has_503_while_starting and not was_ready


class Verdict(enum.StrEnum):
    """The verdict of a request's answer on the server that gave it."""

    ANSWERED = "answered"  # whatever it says is for the client
    OVERLOADED = "overloaded"  # it is well and has no room: try elsewhere, blame nobody
    STARTING = "starting"  # the same
    FAILED = "failed"  # try elsewhere, and blame it


class Judgement(NamedTuple):
    verdict: Verdict
    retry_after_s: float | None = None


def judge(dialect: Dialect, answer: Answer, now_s: float) -> Judgement:
    """Returns the judgement of an answer that is an error. `now_s` is the time of day, for dates in Retry-After."""
    wait_s = retry_after_s(answer.headers, now_s)
    if answer.status == 503 and dialect.health.starting_header and _is_starting(dialect, answer, True):
        return Judgement(Verdict.STARTING, wait_s)
    texts = dialect.overload.texts
    is_busy = answer.status in dialect.overload.statuses
    if is_busy or (answer.status >= 400 and any(text in answer.body for text in texts)):
        return Judgement(Verdict.OVERLOADED, wait_s)
    return Judgement(Verdict.FAILED if answer.status >= 500 else Verdict.ANSWERED, wait_s)


def retry_after_s(headers: Mapping[bytes, bytes], now_s: float) -> float | None:
    """Seconds, milliseconds (as some write it) or a date."""
    if (milliseconds := _number(headers.get(b"retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get(b"retry-after")
    if value is None or (seconds := _number(value)) is not None:
        return seconds if value is not None else None
    try:
        date = parsedate_to_datetime(value.decode("latin-1"))
    except ValueError:
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now_s)


def _number(value: bytes | None) -> float | None:
    try:
        number = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return number if 0 <= number < 1e9 else None
