"""How a load goes while it goes: counts, and one line that says them; redrawn on a terminal, else told at times."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import TextIO

from penstock.bench.lag import LagWatch
from penstock.bench.spread import percentile
from penstock.hub.progress import in_minutes

BAR_WIDTH = 20
REDRAW_EVERY_S = 0.25
LINE_EVERY_S = 5.0


class Board:
    def __init__(self, stream: TextIO | None = None) -> None:
        """None: nothing is shown."""
        self._stream = stream
        self.step = ""  # which of how many the next load is
        self.after_s: float | None = None  # how long the loads after it will take; None: not known, or there are none
        self._redraws = stream is not None and stream.isatty()
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
        wall_s = max(perf_counter() - self._began_s, 1e-9)
        parts = [self.step, self._label or "", self._bar(wall_s), f"{self.num_running} running"]
        parts += [f"{number} {kind}" for kind, number in self.errors.items()]
        parts += [f"{self.num_answered / wall_s:.1f} req/s", f"{self.num_tokens / wall_s:,.0f} tok/s"]
        if self._ttfts:
            parts.append(f"TTFT {1000 * (percentile(self._ttfts, 50) or 0):,.0f} ms")
        if (left_s := self._left_s(wall_s)) is not None:
            of_step = " of this step" if self.step and self.after_s is None else ""
            parts.append(f"{in_minutes(left_s + (self.after_s or 0.0))} left{of_step}")
        if lag_s > 0.005:
            parts.append(f"generator {1000 * lag_s:.0f} ms late")
        return "  ".join(filter(None, parts))

    @asynccontextmanager
    async def shown(self, watch: LagWatch) -> AsyncIterator[None]:
        self._began_s = perf_counter()
        if self._stream is None or self._label is None:
            yield
            return
        task = asyncio.ensure_future(self._show(watch))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._write(self.line(0.0), is_last=True)

    async def _show(self, watch: LagWatch) -> None:
        while True:
            await asyncio.sleep(REDRAW_EVERY_S if self._redraws else LINE_EVERY_S)
            self._write(self.line(watch.latest_s), is_last=False)

    def _write(self, line: str, *, is_last: bool) -> None:
        assert self._stream is not None
        self._stream.write(f"\r\x1b[2K{line}" + "\n" * is_last if self._redraws else f"{line}\n")
        self._stream.flush()

    def _left_s(self, wall_s: float) -> float | None:
        """Seconds left of this load; None: not known."""
        if self._duration_s:
            return max(0.0, self._duration_s - wall_s)
        if self._total and self.num_over:
            return wall_s * (self._total - self.num_over) / self.num_over
        return None

    def _bar(self, wall_s: float) -> str:
        done = f"{self.num_over}" if self._total is None else f"{self.num_over}/{self._total}"
        share = None
        if self._total:
            share = self.num_over / self._total
        elif self._duration_s:
            share = wall_s / self._duration_s
            done += f" in {wall_s:.0f} of {self._duration_s:.0f} s"
        if share is None or not self._redraws:
            return done
        filled = round(min(share, 1.0) * BAR_WIDTH)
        return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {done}"
