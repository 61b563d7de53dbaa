"""Tracker of the end of an answer's thoughts, token by token: for counts and for budgets, which must not depend on how
text was held back or joined on its way to a client."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from penstock.text.reasoning.splitter import Splitter
from penstock.text.tools.parts import Text


class ReasoningTracker:
    def __init__(self, splitter: Splitter, token_bytes: Callable[[int], bytes]) -> None:
        self._splitter = splitter
        self._token_bytes = token_bytes
        self._last = b""
        self.num_tokens = 0  # of thoughts, each mark included that ends one

    @property
    def is_inside(self) -> bool:
        return self._splitter.is_inside

    @property
    def is_answering(self) -> bool:
        return self._splitter.is_answering

    @property
    def is_whole(self) -> bool:
        """The last token does not end within a character."""
        data = self._last[-4:]
        for length, byte in enumerate(reversed(data), 1):
            if byte & 0xC0 != 0x80:  # the first byte of a character
                return byte < 0xC0 or length >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        return True

    def take(self, token_id: int) -> bytes:
        """The text of the answer that this token brings. Marks are ASCII, so bytes are read as characters: no token's
        end has to wait for the next one's beginning."""
        self.num_tokens += self._splitter.is_inside
        data = self._token_bytes(token_id)
        self._last = (self._last + data)[-4:]
        parts = self._splitter.push(data.decode("latin-1"))
        return "".join(part.text for part in parts if isinstance(part, Text)).encode("latin-1")

    def copy(self) -> ReasoningTracker:
        other = ReasoningTracker(deepcopy(self._splitter), self._token_bytes)
        other._last, other.num_tokens = self._last, self.num_tokens
        return other
