"""Processes that end with the one that started them, whatever that one dies of: Linux sends them a signal.

    Popen([sys.executable, "-m", …], env=os.environ | named_parent())    # in the starter
    end_with_named_parent()                                              # in what it starts, first of all

The new process asks for the signal itself. `preexec_fn` would ask for it between fork and exec, where a lock that
another thread of the starter held is held for ever; the starter then waits for ever too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_VARIABLE = "PENSTOCK_PARENT"  # the process id of the starter


def named_parent() -> dict[str, str]:
    """A variable for a process that is to end with this one."""
    return {_VARIABLE: str(os.getpid())}


def end_with_named_parent() -> None:
    """SIGTERM for this process when the starter that named itself ends, or at once if it has ended. Nothing happens
    where none has. The variable is taken out: it is not for processes that this one starts."""
    parent = os.environ.pop(_VARIABLE, None)
    if parent is None:
        return
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent(last_signal: signal.Signals) -> None:
    """This signal for this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, last_signal)
