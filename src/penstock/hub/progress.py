"""Callbacks of long work: how far it is. Downloads count bytes, others what they name."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def __call__(self, what: str, done: int, total: int | None, /) -> None: ...


def silent(what: str, done: int, total: int | None) -> None:
    """Ignores the progress, for callers who want to hear nothing."""
