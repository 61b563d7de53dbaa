"""The seam to whatever knows GPUs, and how several such sources become one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from penstock.core.devices import DeviceReading

log = logging.getLogger("penstock.gpu")


class DeviceSource(Protocol):
    def read(self) -> list[DeviceReading]:
        """Every device it knows, with the errors since the last call. May take its time: not for an event loop."""

    def close(self) -> None: ...


class Joined:
    """Several sources of the same devices: what one cannot tell, the next may."""

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        self._sources = sources
        self._silent: set[int] = set()

    def read(self) -> list[DeviceReading]:
        found: dict[str, DeviceReading] = {}
        for index, source in enumerate(self._sources):
            for reading in self._read(index, source):
                known = found.get(reading.device)
                found[reading.device] = reading if known is None else join(known, reading)
        return list(found.values())

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _read(self, index: int, source: DeviceSource) -> Iterable[DeviceReading]:
        """One that fails says nothing, which is told once."""
        try:
            readings = source.read()
        except Exception as error:
            if index not in self._silent:
                self._silent.add(index)
                log.warning("%s cannot be read: %s", type(source).__name__, error)
            return ()
        self._silent.discard(index)
        return readings


def join(first: DeviceReading, second: DeviceReading) -> DeviceReading:
    """Returns the first, with what it does not say taken from the second; both may know errors."""
    missing = {
        name: getattr(second, name)
        for name in first.__struct_fields__
        if getattr(first, name) in (None, "", ()) and getattr(second, name) not in (None, "", ())
    }
    return msgspec.structs.replace(
        first,
        **missing
        | {
            "xids": (*first.xids, *(xid for xid in second.xids if xid not in first.xids)),
            "is_lost": first.is_lost or second.is_lost,
            "has_bad_rows": first.has_bad_rows or second.has_bad_rows,
        },
    )
