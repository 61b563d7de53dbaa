"""The members of one long list inside of a JSON object, told one by one while its bytes come.

`{"requests": [{…}, {…}]}` may have hundreds of megabytes; its members are small. Nothing is held but the member that is
coming. Only where members begin and end is found here: whoever is told one reads it as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.core.errors import InvalidRequest

_SPACE = b" \t\r\n"
_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'["\\]')


class JsonMembers:
    """The items of the object's only member, a list of objects. Raises InvalidRequest for anything else."""

    def __init__(self, name: str, told: Callable[[bytes], None], max_bytes: int) -> None:
        """`max_bytes`: of one member of the list."""
        self._name = name
        self._told = told
        self._max_bytes = max_bytes
        self._before = re.compile(rb'\s*\{\s*"%b"\s*:\s*\[' % name.encode())
        self._held = bytearray()
        self._at = 0  # of what is held, has been looked at
        self._depth = 0
        self._is_inside = False  # a string
        self._stage = self._begin
        self._needs_comma = False

    def feed(self, data: bytes) -> None:
        self._held += data
        while self._stage():
            pass
        if len(self._held) > self._max_bytes:
            raise InvalidRequest(f"{self._name}: a member has more than {self._max_bytes} bytes", param=self._name)

    def close(self) -> None:
        """The body is at its end."""
        if self._stage != self._end or self._held.strip(_SPACE):
            raise InvalidRequest("the body is not valid JSON: it breaks off")

    # Each stage takes what it can, and returns whether another one may go on.

    def _begin(self) -> bool:
        found = self._before.match(self._held)
        if found is None:
            if len(self._held) > 1024:
                raise InvalidRequest(f'expected an object: {{"{self._name}": […]}}', param=self._name)
            return False
        del self._held[: found.end()]
        self._stage = self._between
        return True

    def _between(self) -> bool:
        """Reads what is between members: a comma, the next member, or the list's end. False: more bytes are needed."""
        rest = self._held.lstrip(_SPACE)
        del self._held[: len(self._held) - len(rest)]
        if not self._held:
            return False
        first = bytes(self._held[:1])
        if first == b"," and self._needs_comma:
            del self._held[:1]
            self._needs_comma = False
        elif first == b"{" and not self._needs_comma:
            self._at, self._depth, self._stage = 0, 0, self._member
        elif first == b"]":
            del self._held[:1]
            self._stage = self._close_object
        else:
            raise InvalidRequest(f"{self._name}: expected a list of objects", param=self._name)
        return True

    def _member(self) -> bool:
        while True:
            found = (_INSIDE if self._is_inside else _OUTSIDE).search(self._held, self._at)
            if found is None:
                self._at = len(self._held)
                return False
            mark, self._at = found[0], found.end()
            if mark == b'"':
                self._is_inside = not self._is_inside
            elif mark == b"\\":
                if self._at == len(self._held):  # what it stands before comes later
                    self._at -= 1
                    return False
                self._at += 1
            elif mark in (b"{", b"["):
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    break
        member = bytes(self._held[: self._at])
        del self._held[: self._at]
        self._needs_comma, self._stage = True, self._between
        self._told(member)
        return True

    def _close_object(self) -> bool:
        rest = self._held.lstrip(_SPACE)
        del self._held[: len(self._held) - len(rest)]
        if not self._held:
            return False
        if self._held[:1] != b"}":
            raise InvalidRequest(f"the object has another member than {self._name}")
        del self._held[:1]
        self._stage = self._end
        return True

    def _end(self) -> bool:
        if self._held.strip(_SPACE):
            raise InvalidRequest("the body is not valid JSON: something follows the object")
        self._held.clear()
        return False
