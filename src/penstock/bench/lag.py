"""The lag of the generator itself. A timestamp is no better than the event loop that takes it, so that is watched."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from penstock.bench.spread import Spread

TICK_S = 0.01
SMALL_S = 0.002  # a lag below this is the timer's own
LATE_S = 0.010  # requests that leave later than this change the load
BUSY = 0.9  # of a core


@dataclass(frozen=True)
class GeneratorHealth:
    cpu: float  # share of one core
    lag: Spread | None  # how late the event loop came to a timer; every stamp may be that late
    send_delay: Spread | None  # from when a request was to leave until it left; None: nothing had a time


class LagWatch:
    """A timer every 10 ms, and how late each came. Times are kept as they are: an hour is a few megabytes."""

    def __init__(
        self, clock: Callable[[], float] = perf_counter, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lags: list[float] = []
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = self._began_cpu_s = 0.0

    @property
    def latest_s(self) -> float:
        """The largest of the last second."""
        return max(self._lags[-round(1 / TICK_S) :], default=0.0)

    def start(self) -> None:
        self._began_s, self._began_cpu_s = self._clock(), self._cpu_clock()
        self._wait()

    def stop(self, send_delays: list[float]) -> GeneratorHealth:
        if self._timer is not None:
            self._timer.cancel()
        wall_s = self._clock() - self._began_s
        cpu_s = self._cpu_clock() - self._began_cpu_s
        return GeneratorHealth(
            cpu=cpu_s / wall_s if wall_s else 0.0, lag=Spread.of(self._lags), send_delay=Spread.of(send_delays)
        )

    def _wait(self) -> None:
        self._due_s = self._clock() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """A pause that swallowed several ticks counts for each: the watch must not omit what it missed either."""
        lag_s = max(0.0, self._clock() - self._due_s)
        self._lags.append(lag_s)
        while (lag_s := lag_s - TICK_S) > 0:
            self._lags.append(lag_s)
        self._wait()


def doubts(health: GeneratorHealth, *, ttft: Spread | None, tpot: Spread | None) -> list[str]:
    """Returns why figures are not to be trusted; empty: they are."""
    found = []
    if health.cpu > BUSY:
        found.append(f"the generator used {health.cpu:.0%} of its core: it may have been the bottleneck")
    if health.lag is not None and health.lag.p99 > SMALL_S:
        figures = {"TTFT": ttft, "TPOT": tpot}
        near = [f"{name} ({1000 * f.p50:.1f} ms)" for name, f in figures.items() if f and health.lag.p99 > f.p50 / 10]
        if near:
            found.append(
                f"stamps were up to {1000 * health.lag.p99:.1f} ms late (p99), more than a tenth of "
                f"{' and '.join(near)}: not to be trusted"
            )
    late = health.send_delay
    if late is not None and late.p99 > LATE_S and (ttft is None or late.p99 > ttft.p50 / 10):
        found.append(
            f"requests left up to {1000 * late.p99:.0f} ms after their time (p99): latencies count from that time, so "
            "part of them is the generator's own"
        )
    return found


def raise_file_limit() -> None:
    """A stream is a socket: as many as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
