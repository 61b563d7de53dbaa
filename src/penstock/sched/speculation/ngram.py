"""Drafts out of the text itself: what followed the last time the same tokens came. It needs no model, only a dict.

A text that the client expects in the answer (`Request.predicted_ids`) counts as if it stood before the prompt.

The tokens of a sequence are chained by pairs, as a compressor chains bytes: from its last two tokens one gets to the
places where the same two stood before, the latest first, and of those the one that agrees furthest back is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

from penstock.core.images import FIRST_IMAGE_TOKEN
from penstock.sched.sequence import Sequence as LiveSequence

_MAX_PLACES = 16  # to look at
_MAX_AGREEMENT = 16  # tokens; a place that agrees so far back is as good as any
_ID_BITS = 32
# Kinds by how many tokens agree, for what they are worth: two, three, four, …, eight or more.
_KINDS = (0, 0, 0, 1, 2, 2, 3, 3, *[4] * (_MAX_AGREEMENT - 7))


class PromptLookup:
    """N-gram proposer for any number of sequences; what it knows of one goes with it."""

    is_settled = True  # no look takes long
    is_steadfast = False  # another token, another place

    def __init__(self) -> None:
        self._chains: WeakKeyDictionary[LiveSequence, PairChains] = WeakKeyDictionary()

    def look(self, sequence: LiveSequence) -> int | None:
        """Quality of the place found to copy from, as a small number; None: there is none."""
        chains = self._chains.get(sequence)
        if chains is None:
            chains = self._chains[sequence] = PairChains(sequence.request.predicted_ids)
        agreement = chains.look(sequence.token_ids)
        return _KINDS[agreement] if agreement else None

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        return [self._chains[sequence].copy(count) for sequence, count in wanted]


class PairChains:
    def __init__(self, before: Sequence[int] = ()) -> None:
        """`before`: tokens to copy from that are not of the text itself."""
        self._text = list(before)
        self._num_before = len(self._text)
        self._latest: dict[int, int] = {}  # where each pair of tokens ended last
        self._before: list[int] = []  # for every place, where its pair ended before; -1: nowhere
        self._found = -1

    def look(self, token_ids: Sequence[int]) -> int:
        """Takes in all tokens so far; returns how many of the last ones agree with those at the best place; 0: none."""
        self._extend(token_ids)
        token_ids = self._text
        end = len(token_ids) - 1
        place = self._before[end] if end >= 0 else -1
        best = 0
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            agreement = 2
            while (
                agreement < _MAX_AGREEMENT
                and agreement <= place
                and token_ids[place - agreement] == token_ids[end - agreement]
            ):
                agreement += 1
            if agreement > best:
                best, self._found = agreement, place
                if best == _MAX_AGREEMENT:
                    break
            place = self._before[place]
        return best

    def copy(self, count: int) -> list[int]:
        """The tokens that follow where the last look found, up to an image of the prompt; where that runs into the end,
        it goes round."""
        start = self._found + 1
        found = self._text[start : start + count]
        period = len(self._text) - start
        while len(found) < count:
            found.append(found[-period])
        return list(takewhile(lambda token_id: token_id < FIRST_IMAGE_TOKEN, found))

    def _extend(self, token_ids: Sequence[int]) -> None:
        latest, before, text = self._latest, self._before, self._text
        text += token_ids[len(text) - self._num_before :]
        if not before and text:
            before.append(-1)  # nothing stands before the first
        for place in range(len(before), len(text)):
            pair = text[place - 1] << _ID_BITS | text[place]
            before.append(latest.get(pair, -1))
            latest[pair] = place
