"""Conversion of plain values to typed ones, whatever other threads do."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar, overload

import msgspec

T = TypeVar("T")

_describing = threading.Lock()


class Converter(Generic[T]):
    """Conversion to one type, for a constant of a module.

    msgspec describes a class when it first meets it, and a second thread that meets it meanwhile ends the process with
    SIGSEGV. A converter has the whole description before its first use, as a `msgspec.json.Decoder` does: one that is
    made at import is safe, and those that are made later wait for each other.
    """

    @overload
    def __init__(self, type: type[T]) -> None: ...

    @overload
    def __init__(self: Converter[Any], type: Any) -> None: ...

    def __init__(self, type: Any) -> None:
        with _describing:
            msgspec.msgpack.Decoder(type)  # the classes in it keep their descriptions
        self._type = type

    def convert(self, values: object, *, strict: bool = True) -> T:
        """Raises ValidationError."""
        found: T = msgspec.convert(values, self._type, strict=strict)
        return found
