"""One call as a JSON object, read as it is written: `{"name": "f", "arguments": {…}}`.

Its name is told once it is sure to be a call, and its arguments as they come. Keys may stand in any order, and
`parameters` is Llama's word for `arguments`. The arguments are not parsed: a client gets them as the model wrote them,
good JSON or not. Only a line break inside a string is mended, which JSON wants escaped.
"""

from __future__ import annotations

import enum
import json

from penstock.text.tools.json_scan import SPACE, Scan, ValueScan

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")  # that models write beside them
_ESCAPED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class State(enum.Enum):
    OPEN = 0
    ENDED = 1
    BROKEN = 2  # it is no call, or no longer one


class ArgumentText:
    """The value of `arguments`. An object is passed on as it comes, anything else at its end: some models write the
    object into a string."""

    def __init__(self) -> None:
        self._scan = ValueScan()
        self._held: list[str] | None = None  # of what is no object
        self._fresh: list[str] = []
        self._is_begun = False

    def take(self, character: str) -> Scan:
        if not self._is_begun:
            self._is_begun = True
            self._held = None if character == "{" else []
        if self._scan.is_in_string:
            character = _ESCAPED.get(character, character)
        scan = self._scan.take(character)
        if scan in (Scan.MORE, Scan.LAST):
            (self._fresh if self._held is None else self._held).append(character)
        if scan in (Scan.LAST, Scan.AFTER) and self._held is not None:
            self._fresh.append(_object_in("".join(self._held)))
        return scan

    def run(self, text: str, at: int) -> int:
        """Takes plain characters of a string, as many as there are from `at` on; gives the end of them."""
        end = self._scan.plain_end(text, at)
        if end > at:
            (self._fresh if self._held is None else self._held).append(text[at:end])
        return end

    def taken(self) -> str:
        """Text that came since this was last called."""
        text, self._fresh = "".join(self._fresh), []
        return text


class _At(enum.Enum):
    KEY = 0  # or the end of the object
    COLON = 1
    VALUE = 2


class CallObject:
    """Takes what comes after the opening brace."""

    def __init__(self) -> None:
        self.name: str | None = None  # once the call has begun: with the first of its arguments
        self._told_name: str | None = None
        self._arguments: ArgumentText | None = None
        self._at = _At.KEY
        self._key = ""
        self._scan: ValueScan | ArgumentText | None = None  # of the key or value that is being read
        self._read: list[str] = []  # of it

    def taken(self) -> str:
        """The argument text since this was last asked."""
        return self._arguments.taken() if self.name is not None and self._arguments is not None else ""

    def run(self, text: str, at: int) -> int:
        """Takes plain characters of a string, as `ArgumentText.run`; returns the end of them."""
        return self._scan.run(text, at) if isinstance(self._scan, ArgumentText) else at

    def take(self, character: str) -> State:
        if self._scan is not None:
            return self._go_on(character)
        if character in SPACE:
            return State.OPEN
        match self._at:
            case _At.COLON:
                self._at = _At.VALUE
                return State.OPEN if character == ":" else State.BROKEN
            case _At.VALUE:
                return self._begin_value(character)
        if character == "}":
            return self._end()
        if character == '"':
            self._scan, self._read = ValueScan(), []
            return self._go_on(character)
        return State.OPEN if character == "," else State.BROKEN

    def _begin_value(self, character: str) -> State:
        self._scan, self._read = ValueScan(), []
        if self._key in _ARGUMENTS:
            if self._arguments is not None:
                return State.BROKEN
            self._scan = self._arguments = ArgumentText()
            self.name = self._told_name
        elif self._key == "name":
            if character != '"' or self._told_name is not None:
                return State.BROKEN
        elif self._key not in _OTHERS and self.name is None:
            return State.BROKEN  # it is some other object
        return self._go_on(character)

    def _go_on(self, character: str) -> State:
        assert self._scan is not None
        scan = self._scan.take(character)
        if scan is Scan.BROKEN:
            return State.BROKEN
        if scan is not Scan.AFTER:
            self._read.append(character)
        if scan is Scan.MORE:
            return State.OPEN
        self._scan = None
        if self._finish() is State.BROKEN:
            return State.BROKEN
        return self.take(character) if scan is Scan.AFTER else State.OPEN

    def _finish(self) -> State:
        if self._at is _At.KEY:
            self._key, self._at = _string(self._read) or "", _At.COLON
            return State.OPEN
        self._at = _At.KEY
        if self._key == "name":
            self._told_name = _string(self._read)
            if not self._told_name:
                return State.BROKEN
            if self._arguments is not None:
                self.name = self._told_name
        return State.OPEN

    def _end(self) -> State:
        if self._told_name is None:
            return State.BROKEN
        self.name = self._told_name
        if self._arguments is None:
            self._arguments = ArgumentText()
            for character in "{}":
                self._arguments.take(character)
        return State.ENDED


def _string(read: list[str]) -> str | None:
    try:
        value = json.loads("".join(read), strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _object_in(text: str) -> str:
    """Text of arguments that are no object: JSON in a string, nothing, or a mistake that its reader is to see."""
    if text in ("null", '""'):
        return "{}"
    return _string([text]) or text
