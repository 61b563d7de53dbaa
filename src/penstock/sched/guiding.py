"""Guided decoding as the scheduler sees it: when a sequence may run, what may come next, and what must.

A mask takes time to make, and the token before it has to be known; but it is needed only when the device has computed
what to choose from. So a plan carries something that is asked for its bits then, and waits if it must. A token chosen
for a place that a forced token has taken meanwhile is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.core.request import FinishReason


class Mask(Protocol):
    def bits(self) -> bytes:
        """One bit per token of the vocabulary, the lowest id first: those that may come. At least one may."""


class Follow(NamedTuple):
    """Tokens forced after a token: they need not be chosen, and perhaps the sequence ends with them."""

    token_ids: list[int]
    finish: FinishReason | None = None
    error: str | None = None  # with FinishReason.ERROR
    error_code: str | None = None  # of an error that is not the engine's


class TokenGuide(Mask, Protocol):
    """Keeps one sequence to its guide. It is told every token, once and in order; its bits are for the next one."""

    @property
    def is_quick(self) -> bool:
        """Nobody need mind waiting for its bits, so its sequence may be planned before they are there."""

    @property
    def is_ready(self) -> bool:
        """It is quick, or its bits are there."""

    def take(self, token_id: int) -> Follow: ...

    def ahead(self, drafts: Sequence[int]) -> Sequence[Mask]:
        """Masks of the places after each draft, if it and all before it are taken. Called only while it is quick."""
