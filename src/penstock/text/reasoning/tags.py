"""Thoughts between two marks at the beginning of an answer: `<think>…</think>` and what others write in its place.

Many templates open the thoughts themselves, so that an answer begins inside of them. No mark means anything after the
closing one. Some families put the answer between marks of its own, which are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.text.reasoning.splitter import without_beginning
from penstock.text.tools.parts import Part, ReasoningText, Text, add

_SPACE = " \t\r\n"  # what may stand before the opening mark


@dataclass(frozen=True)
class Tags:
    opens: tuple[str, ...] = ("<think>",)  # the first is what models are taught, others are read too
    closes: tuple[str, ...] = ("</think>",)
    answer: tuple[str, str] | None = None  # marks around the answer
    gap: str = "\n"  # characters next to a mark that belong to neither side

    def opens_at_end(self, prompt_end: str) -> bool:
        """Whether a prompt ends inside of thoughts that its template has opened."""
        return prompt_end.rstrip().endswith(self.opens)

    def closes_at_end(self, prompt_end: str) -> bool:
        """Whether a prompt ends with thoughts that its template has closed: there will be none."""
        return prompt_end.rstrip().endswith(self.closes)


class TagSplitter:
    def __init__(self, tags: Tags, *, is_inside: bool) -> None:
        self._tags = tags
        self.is_inside = is_inside
        self.is_answering = False
        self._is_after_mark = is_inside
        self._answer_opens, self._answer_closes = tags.answer or ("", "")
        self._held = ""
        self._is_done = False  # the mark that ends the answer was there

    def push(self, text: str) -> list[Part]:
        if self._is_done:
            return []
        self._held += text
        found: list[Part] = []
        if not self.is_inside and not self.is_answering:
            self._look_for_beginning()
        if self.is_inside:
            self._think(found)
        if self.is_answering:
            self._answer(found)
        return found

    def flush(self, *, is_cut: bool) -> list[Part]:
        held, self._held = self._held, ""
        held = self._stripped(held)
        if not held:
            return []
        return [ReasoningText(held) if self.is_inside else Text(held)]

    def _look_for_beginning(self) -> None:
        begun = self._held.lstrip(_SPACE)
        opened = next((mark for mark in self._tags.opens if begun.startswith(mark)), None)
        if opened is not None:
            self.is_inside, self._is_after_mark, self._held = True, True, begun[len(opened) :]
        elif begun and not any(mark.startswith(begun) for mark in self._tags.opens):
            self.is_answering = True
            self._answer_opens = self._answer_closes = ""  # nothing says that this is one between marks

    def _think(self, found: list[Part]) -> None:
        held, closes = self._held, self._tags.closes
        at, mark = min(((held.find(mark), mark) for mark in closes if mark in held), default=(-1, ""))
        if at >= 0:
            thought, self._held = held[:at], held[at + len(mark) :]
        else:
            thought, self._held = without_beginning(held, closes)
        if thought := self._stripped(thought):
            add(found, ReasoningText(thought))
        if at >= 0:
            self.is_inside, self.is_answering, self._is_after_mark = False, True, True

    def _answer(self, found: list[Part]) -> None:
        text = self._stripped(self._held)
        self._held = ""
        if self._answer_opens and text:
            begun = text.lstrip(_SPACE)
            if begun.startswith(self._answer_opens):
                text, self._answer_opens, self._is_after_mark = begun[len(self._answer_opens) :], "", True
                text = self._stripped(text)
            elif self._answer_opens.startswith(begun):
                self._held, text = text, ""
            else:
                self._answer_opens = self._answer_closes = ""
        if self._answer_closes and not self._answer_opens:
            text = self._until_end(text)
        if text:
            add(found, Text(text))

    def _until_end(self, text: str) -> str:
        """The text up to the mark that ends the answer; what stands behind it is nobody's."""
        before, mark, _ = text.partition(self._answer_closes)
        if mark:
            self._held, self._is_done = "", True
            return before.rstrip(self._tags.gap)
        settled, self._held = without_beginning(text, [self._answer_closes])
        stripped = settled.rstrip(self._tags.gap)
        self._held = settled[len(stripped) :] + self._held
        return stripped

    def _stripped(self, text: str) -> str:
        if self._is_after_mark:
            text = text.lstrip(self._tags.gap)
            self._is_after_mark = not text
        return text
