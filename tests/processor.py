"""The processor's speed at the moment: neighbours on the same machine change it several times over in minutes."""

from __future__ import annotations

import time

_LOOP_S = 0.002  # CPU seconds of the loop below on the machine that limits in CPU seconds are meant for


def slowness() -> float:
    """CPU seconds of a fixed piece of work in this thread, over what they usually are."""
    began_s = time.thread_time()
    total = 0
    for number in range(50_000):
        total += number & 7
    return (time.thread_time() - began_s) / _LOOP_S
