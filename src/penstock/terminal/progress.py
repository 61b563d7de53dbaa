"""Progress of long work: how far it is and how long it will take. Downloads count bytes; others what they like."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_BAR_WIDTH = 30
_LINE_EVERY_S = 5.0  # where there is no terminal
_REDRAW_EVERY_S = 0.1
_MOVES_PER_S = 4  # of a bar that counts nothing


class ProgressBar:
    """A bar on a terminal; now and then a plain line anywhere else (logs, CI)."""

    def __init__(
        self, stream: TextIO | None = None, *, unit: str = "MB", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The bar counts bytes, shown as MB; with another unit, that."""
        self._stream = stream or sys.stderr
        self._unit = unit
        self._clock = clock
        self._bars = _Bars(self._stream, unit, clock) if self._stream.isatty() else None
        self._what: str | None = None
        self._shown_at_s = self._began_at_s = 0.0
        self._first = 0  # done when it began: of a download that goes on

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Without a total, `what` is news about the work."""
        if self._bars is not None:
            self._bars.show(what, done, total)
            return
        now = self._clock()
        is_new = what != self._what
        if is_new:
            self._began_at_s, self._first = now, done
        if not (is_new or done == total or now - self._shown_at_s >= _LINE_EVERY_S):
            return
        self._what, self._shown_at_s = what, now
        line = _line(what, done, total, self._unit)
        if total is not None and self._first < done < total:
            pace_s = (now - self._began_at_s) / (done - self._first)
            line += f", {in_minutes(pace_s * (total - done))} left"
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Ends work that is over before all of it was counted."""
        if self._bars is not None:
            self._bars.close()


class _Bars:
    """A bar of `rich` for each part of the work; those that are done stay on the screen."""

    def __init__(self, stream: TextIO, unit: str, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._unit = unit
        self._clock = clock
        self._progress: Progress | None = None  # while a bar is on the screen
        self._what: str | None = None
        self._task: TaskID
        self._shown_at_s = 0.0

    def show(self, what: str, done: int, total: int | None) -> None:
        if total is None:
            self.close()
            print(what, file=self._stream)
            return
        progress, now = self._progress or self._start(), self._clock()
        is_new = what != self._what
        if is_new:
            self._what, self._task = what, progress.add_task(what, completed=done, total=total)
        is_shown = is_new or done == total or now - self._shown_at_s >= _REDRAW_EVERY_S
        progress.update(self._task, completed=done, total=total, refresh=is_shown)
        if is_shown:
            self._shown_at_s = now
        if done == total:
            self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            atexit.unregister(self._progress.stop)
            self._what = self._progress = None

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        counted = (
            [DownloadColumn()]
            if self._unit == "MB"
            else [TextColumn(f"{{task.completed}}/{{task.total}} {self._unit}")]
        )
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.percentage:>3.0f}%"),
            *counted,
            TimeRemainingColumn(compact=True),
            console=Console(file=self._stream, markup=False, highlight=False, emoji=False),
            get_time=self._clock,
            auto_refresh=False,
            redirect_stdout=False,  # errors and log lines stand above the bar; what is piped goes its own way
        )
        self._progress.start()
        atexit.register(self._progress.stop)  # an error or Ctrl-C leaves the terminal as it was, too
        return self._progress


class PhaseBars:
    """The phases of one piece of work on a terminal, a bar for each; those that are over stay on the screen. Where
    nothing is counted the bar moves to and fro. It is one line at a time: what other processes write stays there."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._progress: Progress | None = None
        self._what: str | None = None
        self._task: TaskID

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """`what` is the phase that runs; another one's beginning ends the one before."""
        if self._progress is None or what != self._what:
            self.finish()
            self._progress, self._what = self._start(), what
            self._task = self._progress.add_task(what, total=None, counted="")
        counted = f"{done}/{total}" if total else ""
        self._progress.update(self._task, completed=done, total=total or None, counted=counted, refresh=True)

    def finish(self) -> None:
        """Ends the last phase, which is over."""
        if self._progress is not None:
            total = self._progress.tasks[0].total or 1
            self._progress.update(self._task, completed=total, total=total)
            self.close()

    def close(self) -> None:
        """Ends a phase that is not over: its bar stays as it is."""
        if self._progress is not None:
            self._progress.stop()
            atexit.unregister(self._progress.stop)
            self._progress = None

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        progress = Progress(
            TimeElapsedColumn(),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.description} {task.fields[counted]}", markup=False),
            console=Console(file=self._stream, markup=False, highlight=False, emoji=False),
            get_time=self._clock,
            refresh_per_second=_MOVES_PER_S,
        )
        progress.start()
        atexit.register(progress.stop)  # an error or Ctrl-C leaves the terminal as it was, too
        return progress


def in_minutes(seconds: float) -> str:
    """0:07, 12:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _line(what: str, done: int, total: int | None, unit: str) -> str:
    if total is None:
        return what
    share = min(done / total, 1.0) if total else 1.0
    filled = round(share * _BAR_WIDTH)
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    counted = f"{done / 1e6:,.1f}/{total / 1e6:,.1f}" if unit == "MB" else f"{done}/{total}"
    return f"{what} [{bar}] {share:4.0%} {counted} {unit}"
