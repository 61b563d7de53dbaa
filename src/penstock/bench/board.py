"""The board of a load while it goes: counts, and one line that says them; redrawn on a terminal, else told at times."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

from penstock.bench.lag import LagWatch
from penstock.bench.spread import percentile
from penstock.terminal.progress import in_minutes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

BAR_WIDTH = 20
REDRAW_EVERY_S = 0.25
LINE_EVERY_S = 5.0


class Board:
    def __init__(self, stream: TextIO | None = None) -> None:
        """None: nothing is shown."""
        self._stream = stream
        self.step = ""  # which of how many the next load is
        self.after_s: float | None = None  # how long the loads after it will take; None: not known, or there are none
        self.begin(None, None, None)

    @classmethod
    def on_stderr(cls) -> Board:
        return cls(sys.stderr)

    def begin(self, label: str | None, total: int | None, duration_s: float | None) -> None:
        """A new load; without a label it is not shown. `total` is of conversations, `duration_s` how long they begin;
        what is not known is None."""
        self._label = label
        self._total = total
        self._duration_s = duration_s
        self._began_s = perf_counter()
        self.num_running = self.num_answered = self.num_tokens = self.num_over = 0
        self.errors: Counter[str] = Counter()
        self._ttfts: deque[float] = deque(maxlen=100)

    def begun(self) -> None:
        self.num_running += 1

    def ended(self, ttft_s: float | None, num_tokens: int, error: str | None) -> None:
        self.num_running -= 1
        if error is not None:
            self.errors[error] += 1
        else:
            self.num_answered += 1
            self.num_tokens += num_tokens
            if ttft_s is not None:
                self._ttfts.append(ttft_s)

    def conversation_over(self) -> None:
        self.num_over += 1

    def line(self, lag_s: float) -> str:
        wall_s = self._wall_s()
        return "  ".join(filter(None, [self.step, self._label, self._done(wall_s), self._counts(wall_s, lag_s)]))

    def _counts(self, wall_s: float, lag_s: float) -> str:
        parts = [f"{self.num_running} running"]
        parts += [f"{number} {kind}" for kind, number in self.errors.items()]
        parts += [f"{self.num_answered / wall_s:.1f} req/s", f"{self.num_tokens / wall_s:,.0f} tok/s"]
        if self._ttfts:
            parts.append(f"TTFT {1000 * (percentile(self._ttfts, 50) or 0):,.0f} ms")
        if (left_s := self._left_s(wall_s)) is not None:
            of_step = " of this step" if self.step and self.after_s is None else ""
            parts.append(f"{in_minutes(left_s + (self.after_s or 0.0))} left{of_step}")
        if lag_s > 0.005:
            parts.append(f"generator {1000 * lag_s:.0f} ms late")
        return "  ".join(parts)

    @asynccontextmanager
    async def shown(self, watch: LagWatch) -> AsyncIterator[None]:
        self._began_s = perf_counter()
        if self._stream is None or self._label is None:
            yield
            return
        with _bar_on(self._stream) if self._stream.isatty() else nullcontext() as live:
            task = asyncio.ensure_future(self._show(live, watch))
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                self._tell(live, 0.0)

    async def _show(self, live: Live | None, watch: LagWatch) -> None:
        while True:
            await asyncio.sleep(LINE_EVERY_S if live is None else REDRAW_EVERY_S)
            self._tell(live, watch.latest_s)

    def _tell(self, live: Live | None, lag_s: float) -> None:
        if live is not None:
            live.update(self._row(lag_s), refresh=True)
        else:
            print(self.line(lag_s), file=self._stream, flush=True)

    def _row(self, lag_s: float) -> RenderableType:
        """A bar, and the counts below it."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        wall_s = self._wall_s()
        share = self._share(wall_s)
        bar = [ProgressBar(1.0, share, width=BAR_WIDTH)] if share is not None else []
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_row(*filter(None, [self.step, self._label]), *bar, self._done(wall_s))
        return Group(row, self._counts(wall_s, lag_s))

    def _wall_s(self) -> float:
        return max(perf_counter() - self._began_s, 1e-9)

    def _left_s(self, wall_s: float) -> float | None:
        """Seconds left of this load; None: not known."""
        if self._duration_s:
            return max(0.0, self._duration_s - wall_s)
        if self._total and self.num_over:
            return wall_s * (self._total - self.num_over) / self.num_over
        return None

    def _share(self, wall_s: float) -> float | None:
        if self._total:
            return self.num_over / self._total
        return min(1.0, wall_s / self._duration_s) if self._duration_s else None

    def _done(self, wall_s: float) -> str:
        if self._total is not None:
            return f"{self.num_over}/{self._total}"
        return f"{self.num_over}" + (f" in {wall_s:.0f} of {self._duration_s:.0f} s" if self._duration_s else "")


def _bar_on(terminal: TextIO) -> Live:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=terminal, markup=False, highlight=False, emoji=False)
    return Live(console=console, auto_refresh=False, redirect_stdout=False)
