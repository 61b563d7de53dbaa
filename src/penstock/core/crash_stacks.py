"""The stacks of a process that a signal ends, in its log."""

from __future__ import annotations

import faulthandler
import os
import sys

_STDERR = 2


def write_stacks_on_crash() -> None:
    """Writes the stacks of all threads to standard error before SIGSEGV, SIGABRT and their like end the process. Stacks
    that were asked for already (PYTHONFAULTHANDLER, pytest) stay where they are written. A process that was started
    without standard error (`2>&-`) writes none: its descriptor is that of the next file or socket that is opened."""
    if not faulthandler.is_enabled() and _has_stderr():
        faulthandler.enable(_STDERR)


def _has_stderr() -> bool:
    if sys.__stderr__ is None:  # it was closed when the interpreter started
        return False
    try:
        os.fstat(_STDERR)
    except OSError:
        return False
    return True
