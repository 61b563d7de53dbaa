"""Stop strings in a stream: the text up to the first one, with no more held back than could become one.

The stop that is complete first wins, and of several that end together the longest, so the cut does not depend on
how the text arrives in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` keeps the stop string itself in the text."""
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._include = include
        self._beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._longest_beginning = max((len(stop) - 1 for stop in stops), default=0)
        self._held = ""
        self.hit: str | None = None  # the stop that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be sent, and whether a stop was hit; after a hit there is no more text."""
        if not self._stops:
            return text, False
        if self.hit is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._held, self.hit = "", text[start:end]
            return text[: end if self._include else start], True
        settled = len(text) - self._num_held(text)
        self._held = text[settled:]
        return text[:settled], False

    def flush(self) -> str:
        """The text that was held back for a stop that never came."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        for length in range(min(self._longest_beginning, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
