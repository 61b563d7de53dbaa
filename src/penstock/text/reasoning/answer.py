"""An answer's text to its parts: first its thoughts are told apart, and then the rest is read for calls of tools."""

from __future__ import annotations

from penstock.text.reasoning.splitter import Splitter
from penstock.text.tools.parser import CallParser
from penstock.text.tools.parts import CallBegun, CallEnded, Part, Text, add


class AnswerParser:
    """`calls` is None where no tool may be called, or where the splitter finds the calls itself."""

    def __init__(self, splitter: Splitter | None, calls: CallParser | None, most: int | None = None) -> None:
        """`most`: the number of calls after which it is done, and hears no more; None: no limit."""
        self._splitter = splitter
        self._calls = calls
        self._most = most
        self.num_begun = 0
        self.num_ended = 0

    @property
    def is_done(self) -> bool:
        return self._most is not None and self.num_ended >= self._most

    def push(self, text: str) -> list[Part]:
        return self._read([Text(text)] if self._splitter is None else self._splitter.push(text))

    def flush(self, *, is_cut: bool) -> list[Part]:
        """Parts that were held back, at the end of the text."""
        found = [] if self._splitter is None else self._read(self._splitter.flush(is_cut=is_cut))
        if self._calls is not None:
            for part in self._calls.flush():
                self._count(part)
                add(found, part)
        return found

    def _read(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if self.is_done:
                break
            if self._calls is not None and isinstance(part, Text):
                for told in self._calls.push(part.text):
                    self._count(told)
                    add(found, told)
            elif not isinstance(part, Text) or part.text:
                self._count(part)
                add(found, part)
        return found

    def _count(self, part: Part) -> None:
        self.num_begun += isinstance(part, CallBegun)
        self.num_ended += isinstance(part, CallEnded)
