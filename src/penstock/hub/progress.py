"""How long work tells how far it is and how long it will take. Downloads report bytes; others what they count."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

BAR_WIDTH = 30
LINE_EVERY_S = 5.0  # where there is no terminal to redraw
REDRAW_EVERY_S = 0.1


class Progress(Protocol):
    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None: ...


def silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """For callers who want to hear nothing."""


class ProgressBar:
    """A bar that redraws itself on a terminal; now and then a plain line anywhere else (logs, CI)."""

    def __init__(
        self, stream: TextIO | None = None, *, unit: str = "MB", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """What is counted is bytes, shown as MB; with another unit, that."""
        self._stream = stream or sys.stderr
        self._unit = unit
        self._clock = clock
        self._redraws = self._stream.isatty()
        self._what: str | None = None
        self._shown_at_s = self._began_at_s = 0.0
        self._first = 0  # done when it began: of a download that goes on

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        now = self._clock()
        is_new = what != self._what
        if is_new:
            self._began_at_s, self._first = now, done_bytes
        is_done = done_bytes == total_bytes
        every_s = REDRAW_EVERY_S if self._redraws else LINE_EVERY_S
        if not (is_new or is_done or now - self._shown_at_s >= every_s):
            return
        self._what, self._shown_at_s = what, now
        line = _line(what, done_bytes, total_bytes, self._unit)
        if total_bytes is not None and self._first < done_bytes < total_bytes:
            pace_s = (now - self._began_at_s) / (done_bytes - self._first)
            line += f", {in_minutes(pace_s * (total_bytes - done_bytes))} left"
        if self._redraws:
            end = "\n" if is_done or total_bytes is None else ""
            self._stream.write(f"\r\x1b[2K{line}{end}")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def in_minutes(seconds: float) -> str:
    """0:07, 12:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _line(what: str, done_bytes: int, total_bytes: int | None, unit: str) -> str:
    if total_bytes is None:
        return what
    share = min(done_bytes / total_bytes, 1.0) if total_bytes else 1.0
    filled = round(share * BAR_WIDTH)
    bar = "#" * filled + "-" * (BAR_WIDTH - filled)
    counted = f"{done_bytes / 1e6:,.1f}/{total_bytes / 1e6:,.1f}" if unit == "MB" else f"{done_bytes}/{total_bytes}"
    return f"{what} [{bar}] {share:4.0%} {counted} {unit}"
