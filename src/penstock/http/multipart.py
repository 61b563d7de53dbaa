"""Bodies of type multipart/form-data, read as they come: fields are small and kept, of a file each piece is passed on.

Nothing is held but the part of a boundary that a piece may end with. Limits are on the number of parts, on the size of
a part's head and of a field; the size of a file is for whoever takes its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from email.message import Message

from penstock.core.errors import InvalidRequest

_MAX_PARTS = 32
_MAX_HEAD_BYTES = 4 << 10
_MAX_FIELD_BYTES = 4 << 10
_MAX_BOUNDARY = 70  # as RFC 2046 has it
_NAME = re.compile(rb"[\x21-\x39\x3b-\x7e]+")


def boundary_of(content_type: bytes) -> bytes:
    """Raises InvalidRequest where this is no form."""
    message = Message()
    message["content-type"] = content_type.decode(errors="replace")
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidRequest("expected a form: content-type multipart/form-data with a boundary")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii() or not boundary.isprintable():
        raise InvalidRequest(f"the boundary of a form has 1 to {_MAX_BOUNDARY} printable characters")
    return boundary.encode()


class MultipartReader:
    """Fed with pieces of a body. Raises InvalidRequest for what is no form."""

    def __init__(self, boundary: bytes, file_field: str, write: Callable[[bytes], None]) -> None:
        """`write` is told the bytes of the part called `file_field`, piece by piece."""
        self._delimiter = b"\r\n--" + boundary
        self._file_field = file_field
        self._write = write
        self._held = b"\r\n"  # the first boundary has no line before it
        self._state: Callable[[], bool] = self._skip
        self._num_parts = 0
        self._field: str | None = None  # whose bytes come now; None: the file's
        self._is_over = False
        self._values: dict[str, bytes] = {}
        self.filename: str | None = None  # None: there was no file

    def feed(self, data: bytes) -> None:
        if self._is_over:
            return  # an epilogue
        self._held += data
        while self._state():
            pass

    @property
    def fields(self) -> dict[str, str]:
        """The fields so far, but for the file."""
        return {name: value.decode(errors="replace") for name, value in self._values.items()}

    def close(self) -> None:
        """The body is at its end."""
        if not self._is_over:
            raise InvalidRequest("the form breaks off before its last boundary")

    # Each state takes what it can of `_held`, and returns whether another one may go on.

    def _skip(self) -> bool:
        """Skips up to the first boundary. False: it has not come yet."""
        at = self._held.find(self._delimiter)
        if at < 0:
            if len(self._held) > _MAX_HEAD_BYTES:
                raise InvalidRequest("the form does not begin with its boundary")
            return False
        self._held = self._held[at + len(self._delimiter) :]
        self._state = self._after_boundary
        return True

    def _after_boundary(self) -> bool:
        if len(self._held) < 2:
            return False
        if self._held.startswith(b"--"):
            self._is_over, self._held = True, b""
            return False
        if not self._held.startswith(b"\r\n"):
            raise InvalidRequest("a boundary of the form is followed by something else than the end of its line")
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequest(f"the form has more than {_MAX_PARTS} parts")
        self._state = self._head
        return True

    def _head(self) -> bool:
        at = self._held.find(b"\r\n\r\n")
        if at > _MAX_HEAD_BYTES or (at < 0 and len(self._held) > _MAX_HEAD_BYTES):
            raise InvalidRequest("the head of a part of the form is too large")
        if at < 0:
            return False
        name, filename = _disposition(self._held[:at])
        self._held = self._held[at + 4 :]
        if name == self._file_field:
            if self.filename is not None:
                raise InvalidRequest(f"the form has two files called '{name}'", param=name)
            self._field, self.filename = None, filename if filename is not None else name
        else:
            if name in self._values:
                raise InvalidRequest("a field of the form is there twice", param=name)
            self._field, self._values[name] = name, b""
        self._state = self._body
        return True

    def _body(self) -> bool:
        at = self._held.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._held) - len(self._delimiter) + 1)
        data, self._held = self._held[:end], self._held[end:]
        if self._field is None:
            if data:
                self._write(data)
        else:
            value = self._values[self._field] + data
            if len(value) > _MAX_FIELD_BYTES:
                raise InvalidRequest(f"a field of the form has more than {_MAX_FIELD_BYTES} bytes", param=self._field)
            self._values[self._field] = value
        if at < 0:
            return False
        self._held = self._held[len(self._delimiter) :]
        self._state = self._after_boundary
        return True


def _disposition(head: bytes) -> tuple[str, str | None]:
    """Name and filename of a part."""
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if line and (not colon or not _NAME.fullmatch(name)):
            raise InvalidRequest("the head of a part of the form has a line that is no header")
        if name.lower() == b"content-disposition":
            message = Message()
            message["content-disposition"] = value.decode(errors="replace").strip()
            field = message.get_param("name", header="content-disposition")
            if isinstance(field, str) and field:
                return field, message.get_filename()
    raise InvalidRequest("a part of the form has no name")
