"""Scanner that finds the end of a JSON value, character by character.

It follows strings and brackets and judges nothing else: whether the value is good JSON is for its reader to find out.
"""

from __future__ import annotations

import enum
import re
import string

SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_OUTSIDE_STRINGS = frozenset(string.ascii_letters + string.digits + SPACE + "+-.,:")


class Scan(enum.Enum):
    MORE = 0
    LAST = 1  # the character ends the value
    AFTER = 2  # the value ended before it
    BROKEN = 3  # no JSON goes on like this


class ValueScan:
    def __init__(self) -> None:
        self._depth = 0
        self.is_in_string = False
        self._is_escaped = False

    def plain_end(self, text: str, at: int) -> int:
        """End of the plain characters of a string from `at` on: they change nothing here."""
        if not self.is_in_string or self._is_escaped:
            return at
        found = _PLAIN.match(text, at)
        return found.end() if found else at

    def take(self, character: str) -> Scan:
        if self.is_in_string:
            return self._take_in_string(character)
        if character == '"':
            self.is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if not self._depth:
                return Scan.AFTER
            self._depth -= 1
            return Scan.MORE if self._depth else Scan.LAST
        elif not self._depth and character in ", \t\r\n":
            return Scan.AFTER
        elif character not in _OUTSIDE_STRINGS:
            return Scan.BROKEN
        return Scan.MORE

    def _take_in_string(self, character: str) -> Scan:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self.is_in_string = False
            return Scan.MORE if self._depth else Scan.LAST
        return Scan.MORE
