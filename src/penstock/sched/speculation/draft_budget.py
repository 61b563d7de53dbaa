"""How many drafts are worth their time: arithmetic of chances. It knows no sequence and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Outlook(NamedTuple):
    """Of a sequence that has drafts: the chance that one holds if those before it did, and how many it may have."""

    chance: float
    most: int
    weight: float = 1.0  # the chance that it has them at all


class Costs(Protocol):
    """Of steps with drafts and without, as measured."""

    def room(self, batch: int) -> int:
        """How many drafts a step can have."""

    def wants_plain(self, batch: int) -> bool:
        """A step without drafts is due."""

    def knows_drafts(self, batch: int) -> bool:
        """What they cost was measured, with about as many sequences."""

    def see(self, batch: int, counts: Sequence[int], seconds: float, *, is_ahead: bool) -> None:
        """A step: the drafts of those who had some; whether it was given to the device before the last was read."""

    def can_pay(self, batch: int) -> bool:
        """Drafts may, if they are likely enough."""

    def allot(self, outlooks: Sequence[Outlook], batch: int, slowdown: float) -> list[int]:
        """How many each gets; nobody is to be slowed down by more than `slowdown`."""


def gain(chance: float, count: int) -> float:
    """Tokens that so many drafts bring, on average."""
    return chance * (1 - chance**count) / (1 - chance) if chance < 1 else float(count)


def worthwhile(chance: float, threshold: float, most: int) -> int:
    """How many drafts in a row are each worth `threshold` tokens or more."""
    count, worth = 0, chance
    while count < most and worth >= threshold:
        count, worth = count + 1, worth * chance
    return count


def capped(counts: list[int], most: int) -> list[int]:
    """Not more than `most` in all: those who have many give up some first."""
    cap = max(counts, default=0)
    while cap and sum([min(count, cap) for count in counts]) > most:
        cap -= 1
    return [min(count, cap) for count in counts]
