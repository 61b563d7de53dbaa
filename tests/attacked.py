"""A server of this process under attack: its event loop may not stand still, and it may keep nothing of what it was
sent."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from tools.drills.fuzz import MAX_GROWTH_BYTES

from tests.loop_pauses import MAX_PAUSE_S, watched

_AT_ONCE = 4  # forty attackers have turns of the loop in common: one long pause is many times as long


@contextmanager
def bounded(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Checks after the block. The loop runs in another thread."""
    gc.collect()
    gc.freeze()  # as the processes do: what the tests have made so far is not the loop's to look through
    try:
        before_bytes = _resident_bytes()
        with watched(loop) as pauses:
            yield
        gc.collect()
        grown_bytes = _resident_bytes() - before_bytes
    finally:
        gc.unfreeze()
    pauses.check(_AT_ONCE * MAX_PAUSE_S)
    assert grown_bytes < MAX_GROWTH_BYTES, f"{grown_bytes >> 20} MiB more than before"


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
