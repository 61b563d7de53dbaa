"""Processes that a test has started, and those that they have started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def children(of: int | None, word: str) -> list[psutil.Process]:
    """All below a process (None: the test's own) that run a command with this word. Any may end at any time: one that
    has ended, and that nobody has waited for yet, is left out."""
    return list(_running(psutil.Process(of).children(recursive=True), word))


def _running(processes: list[psutil.Process], word: str) -> Iterator[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too has no command
            if word in process.cmdline():
                yield process
