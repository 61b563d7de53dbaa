"""Time that passes only when a test says so: a clock to hand to code under test, and an event loop that never waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class SteppedClock:
    """Stands still until it is advanced. It is called like `time.monotonic`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that moves its clock to the next timer where others wait for it. It is for coroutines that talk to
    each other in memory: with sockets or threads, how long the others take would be a matter of luck."""

    def __init__(self) -> None:
        self.clock = SteppedClock(0.0)
        super().__init__(_NeverWaiting(self.clock))

    def time(self) -> float:
        return self.clock()


class _NeverWaiting(selectors.DefaultSelector):
    def __init__(self, clock: SteppedClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits for another one"
        self._clock.advance(timeout)
        return super().select(0)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` as `asyncio.run` does, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a coroutine a test that takes no time, however long it sleeps."""

    @wraps(test)
    def whole(*args: P.args, **fixtures: P.kwargs) -> None:
        run(test(*args, **fixtures))

    return whole
