"""A process that ends with the one that started it, whatever that one dies of: it holds the other end of a pipe."""

from __future__ import annotations

import os
import signal
import threading

from penstock.link.parent_death import end_with_parent


def end_with_holder(read_end: int) -> None:
    """Kills this process and those of its group when nobody holds the pipe's other end. Linux does so by itself when
    the thread that started this process ends, also while no thread of Python's gets to run."""
    end_with_parent(signal.SIGKILL)
    threading.Thread(target=_wait, args=(read_end,), daemon=True).start()


def _wait(read_end: int) -> None:
    while os.read(read_end, 1):
        pass
    os.killpg(0, signal.SIGKILL)
