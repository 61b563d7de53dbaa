"""The stacks of a process that a signal ends, in its log."""

from __future__ import annotations

import faulthandler

_STDERR = 2


def write_stacks_on_crash() -> None:
    """Writes the stacks of all threads to standard error before SIGSEGV, SIGABRT and their like end the process. Stacks
    that were asked for already (PYTHONFAULTHANDLER, pytest) stay where they are written."""
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR)
