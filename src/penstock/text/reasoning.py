"""Thoughts of a model, told apart from its answer: what stands between <think> and </think> at the beginning.

Some templates open the thoughts themselves, so that an answer begins inside of them. It knows no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Thought(NamedTuple):
    text: str


class Said(NamedTuple):
    text: str


class ReasoningSplitter:
    """Fed the text of one answer as it comes; what may be the beginning of a mark is held back, and so are lines after
    one, which belong to neither side."""

    def __init__(self, *, is_inside: bool) -> None:
        self.is_inside = is_inside
        self._is_over = False  # no mark means anything any more
        self._is_after_mark = is_inside
        self._held = ""

    def push(self, text: str) -> list[Thought | Said]:
        self._held += text
        if not self.is_inside and not self._is_over:
            self._look_for_beginning()
        found: list[Thought | Said] = []
        if self.is_inside:
            thought, mark, rest = self._held.partition(CLOSE)
            if not mark:
                thought, rest = _without_beginning(thought, CLOSE)
            if thought := self._stripped(thought):
                found.append(Thought(thought))
            self._held = rest
            if mark:
                self.is_inside, self._is_over, self._is_after_mark = False, True, True
        if self._is_over:
            if said := self._stripped(self._held):
                found.append(Said(said))
            self._held = ""
        return found

    def flush(self) -> list[Thought | Said]:
        held, self._held = self._stripped(self._held), ""
        return [Thought(held) if self.is_inside else Said(held)] if held else []

    def _stripped(self, text: str) -> str:
        if self._is_after_mark:
            text = text.lstrip("\n")
            self._is_after_mark = not text
        return text

    def _look_for_beginning(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self.is_inside, self._is_after_mark, self._held = True, True, begun.removeprefix(OPEN)
        elif begun and not OPEN.startswith(begun):
            self._is_over = True


def _without_beginning(text: str, mark: str) -> tuple[str, str]:
    """The text, and its end if that may be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length], text[-length:]
    return text, ""


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends inside of thoughts that its template has opened."""
    return prompt.rstrip().endswith(OPEN)
