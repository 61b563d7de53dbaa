"""Interface of every format's splitter: it is fed the text of one answer as it comes, and tells its parts.

The pieces in which the text came change nothing but how often something is told. Text that may be the beginning of a
mark is held back until it is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from penstock.text.tools.parts import Part


class Splitter(Protocol):
    @property
    def is_inside(self) -> bool:
        """Whether a thought comes next, or the mark that ends it."""

    @property
    def is_answering(self) -> bool:
        """The thoughts are over, or there are none: what comes next is the answer's text."""

    def push(self, text: str) -> list[Part]: ...

    def flush(self, *, is_cut: bool) -> list[Part]:
        """Parts that were held back, at the end of the text. `is_cut`: the answer did not end by itself."""


def without_beginning(text: str, marks: Iterable[str]) -> tuple[str, str]:
    """The text, and its end if that may be the beginning of a mark."""
    longest = max((_num_shared(text, mark) for mark in marks), default=0)
    return text[: len(text) - longest], text[len(text) - longest :]


def _num_shared(text: str, mark: str) -> int:
    """Number of characters of the mark that the text ends with, short of all of it."""
    if mark[0] not in text[1 - len(mark) :]:
        return 0
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
