"""A guide that needs no grammar: at place p of an answer only every third token may come, and at some one alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.request import Request
from penstock.sched.guiding import Follow

FORCED_EVERY = 10


class TurnMask:
    def __init__(self, place: int, vocab_size: int) -> None:
        self._place, self._vocab_size = place, vocab_size

    def bits(self) -> bytes:
        allowed = np.arange(self._vocab_size) % 3 == self._place % 3
        if is_forced(self._place):
            allowed = np.arange(self._vocab_size) == self._place
        return np.packbits(allowed, bitorder="little").tobytes()


class TurnGuide:
    is_quick = is_ready = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._place = 0

    def bits(self) -> bytes:
        return TurnMask(self._place, self._vocab_size).bits()

    def take(self, token_id: int) -> Follow:
        assert follows(token_id, self._place), f"token {token_id} at place {self._place}"
        self._place += 1
        if not is_forced(self._place):
            return Follow([])
        self._place += 1
        return Follow([self._place - 1])

    def ahead(self, drafts: Sequence[int]) -> list[TurnMask]:
        return [TurnMask(self._place + count, self._vocab_size) for count in range(1, len(drafts) + 1)]


class TurnGuides:
    waited_s = 0.0

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def open(self, request: Request) -> TurnGuide:
        return TurnGuide(self._vocab_size)

    def go(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass


def is_forced(place: int) -> bool:
    return place % FORCED_EVERY == FORCED_EVERY - 1


def follows(token_id: int, place: int) -> bool:
    return token_id == place if is_forced(place) else token_id % 3 == place % 3
