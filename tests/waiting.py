"""The one way in which tests wait: for a condition, with a generous bound, and with a report of what was last seen.

A busy machine may leave a process standing for seconds, and that is nobody's fault. So the bound says only when to give
up; no test measures how long a wait took. Code under test that has timers is given a clock that the test moves.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

GIVE_UP_S = 60.0
LOOK_EVERY_S = 0.005  # at first; later less often, for looks take time from what they wait for
SELDOM_S = 0.1
_SHOWN = 2_000  # characters of what was last seen, those at its end


def eventually(look: Callable[[], T], is_so: Callable[[T], object] = bool, *, within_s: float = GIVE_UP_S) -> T:
    """Returns what `look` returned when `is_so` held for it first. Look at a value rather than at a verdict, as in
    `eventually(server.num_open, lambda n: n == 2)`: a failure then tells the value."""
    for found in _looks(look, is_so, within_s):
        if found.is_so:
            return found.value
        time.sleep(found.pause_s)
    raise AssertionError("unreachable")


async def eventually_async(
    look: Callable[[], T], is_so: Callable[[T], object] = bool, *, within_s: float = GIVE_UP_S
) -> T:
    """The same where a loop has to go on meanwhile."""
    for found in _looks(look, is_so, within_s):
        if found.is_so:
            return found.value
        await asyncio.sleep(found.pause_s)
    raise AssertionError("unreachable")


async def eventually_awaited(look: Callable[[], Awaitable[T]], is_so: Callable[[T], object] = bool) -> T:
    """The same for a look that must be awaited itself."""
    seen: list[T] = []
    for found in _looks(lambda: seen[-1:], lambda found: bool(found) and bool(is_so(found[0])), GIVE_UP_S):
        if found.is_so:
            return seen[-1]
        await asyncio.sleep(found.pause_s if seen else 0)
        seen.append(await look())
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Look(Generic[T]):
    value: T
    is_so: bool
    pause_s: float  # until the next one


def _looks(look: Callable[[], T], is_so: Callable[[T], object], within_s: float) -> Iterator[_Look[T]]:
    began_s, num_looks = time.monotonic(), 0
    while True:
        value = look()
        num_looks += 1
        if is_so(value):
            yield _Look(value, True, 0.0)
        elif (waited_s := time.monotonic() - began_s) >= within_s:
            wanted = "" if is_so is bool else f", wanted {_source(is_so)}"
            seen = f"{num_looks} looks in {waited_s:.0f} s at {_source(look)}{wanted}; the last one saw {_short(value)}"
            raise AssertionError(f"it never happened: {seen}")
        else:
            yield _Look(value, False, min(max(LOOK_EVERY_S, waited_s / 10), SELDOM_S))


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"… {shown[-_SHOWN:]}"


def _source(function: Callable[..., object]) -> str:
    try:
        return " ".join(inspect.getsource(function).split())
    except (OSError, TypeError):  # a method of a built-in type
        return repr(function)
