"""A process that ends with the one that started it, whatever that one dies of: it holds the other end of a pipe."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_holder(read_end: int) -> None:
    """Kills this process and those of its group when nobody holds the pipe's other end. Linux does so by itself when
    the thread that started this process ends, also while no thread of Python's gets to run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait, args=(read_end,), daemon=True).start()


def _wait(read_end: int) -> None:
    while os.read(read_end, 1):
        pass
    os.killpg(0, signal.SIGKILL)
