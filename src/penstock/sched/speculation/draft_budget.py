"""Number of drafts worth their time: arithmetic of chances. It knows no sequence and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Outlook(NamedTuple):
    """Prospects of a sequence's drafts: the chance that one holds if those before it did, and how many it may have."""

    chance: float
    most: int
    weight: float = 1.0  # the chance that it has them at all


class Costs(Protocol):
    """Measured costs of steps with drafts and without."""

    def room(self, batch: int) -> int:
        """Number of drafts that a step can have."""

    def wants_plain(self, batch: int) -> bool:
        """Whether a step without drafts is due."""

    def knows_drafts(self, batch: int) -> bool:
        """Whether the cost of drafts was measured, with about as many sequences."""

    def see(self, batch: int, counts: Sequence[int], seconds: float, *, is_ahead: bool) -> None:
        """A step: the drafts of those who had some; whether it was given to the device before the last was read."""

    def can_pay(self, batch: int) -> bool:
        """Whether drafts may pay, if they are likely enough."""

    def allot(self, outlooks: Sequence[Outlook], batch: int, slowdown: float) -> list[int]:
        """Number of drafts for each; nobody is to be slowed down by more than `slowdown`."""


def gain(chance: float, count: int) -> float:
    """Tokens that so many drafts bring, on average."""
    return chance * (1 - chance**count) / (1 - chance) if chance < 1 else float(count)


def worthwhile(chance: float, threshold: float, most: int) -> int:
    """Number of drafts in a row that are each worth `threshold` tokens or more, up to `most`."""
    count, worth = 0, chance
    while count < most and worth >= threshold:
        count, worth = count + 1, worth * chance
    return count


def capped(counts: list[int], most: int) -> list[int]:
    """Counts reduced to `most` in all: those who have many give up some first."""
    cap = max(counts, default=0)
    while cap and sum([min(count, cap) for count in counts]) > most:
        cap -= 1
    return [min(count, cap) for count in counts]
