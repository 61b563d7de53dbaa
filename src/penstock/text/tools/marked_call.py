"""Calls between marks of their own, within the marks of all calls (DeepSeek, Kimi): a name, a mark, JSON, and a mark.

They are read as `CallObject` is. The marks around name and arguments differ between families.
"""

from __future__ import annotations

import re
from typing import ClassVar

from penstock.text.tools.call_object import ArgumentText, State
from penstock.text.tools.json_scan import SPACE, Scan

_MAX_HEAD = 256  # characters


class MarkedCall:
    """Takes what comes after the mark that opens a call. It has ended with the mark that closes it."""

    head: ClassVar[re.Pattern[str]]  # all before the arguments; its group is the name
    close: ClassVar[str]
    closing_space: ClassVar[str] = SPACE  # what may stand between the arguments and that mark

    def __init__(self) -> None:
        self.name: str | None = None
        self._head = ""
        self._arguments = ArgumentText()
        self._tail: str | None = None  # behind the arguments

    def taken(self) -> str:
        return self._arguments.taken() if self.name is not None else ""

    def run(self, text: str, at: int) -> int:
        return self._arguments.run(text, at) if self._tail is None else at

    def take(self, character: str) -> State:
        if self._tail is not None:
            return self._end(self._tail + character)
        if self.name is None:
            if character != "{":
                self._head += character
                return State.OPEN if len(self._head) <= _MAX_HEAD else State.BROKEN
            head = self.head.fullmatch(self._head)
            if head is None:
                return State.BROKEN
            self.name = next(filter(None, head.groups()))
        match self._arguments.take(character):
            case Scan.MORE:
                return State.OPEN
            case Scan.LAST:
                self._tail = ""
                return State.OPEN
            case _:
                return State.BROKEN

    def _end(self, tail: str) -> State:
        self._tail = tail
        found = tail.lstrip(self.closing_space)
        if found == self.close:
            return State.ENDED
        return State.OPEN if self.close.startswith(found) else State.BROKEN
