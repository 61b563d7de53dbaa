"""The slots of all tenants of a host, in a file: whoever serves the limiter next knows what was admitted before.

Every change of a slot is appended at once, in one write, so a process that is killed loses nothing. The file is for the
next process of this host, not for the next start of the host: times are those of its clock, which begins anew then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.observe.background import count_error
from penstock.tenancy.limits.quota import MINUTE
from penstock.tenancy.limits.window import Slot

MAX_BYTES = 4 << 20  # then it is written anew, without what is over


class _Change(msgspec.Struct, array_like=True):
    tenant: str
    start: int
    newest: int
    requests: int
    tokens: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Change).decode


class SlotJournal:
    """One process at a time has it open: the one that holds the lock of the host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._max_bytes = MAX_BYTES
        self.num_bytes = 0

    def load(self, now: int) -> dict[str, list[Slot]]:
        """Slots of the last minute, in order. A line that is not whole is the last of a host that lost its power."""
        found: dict[str, dict[int, Slot]] = {}
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        self.num_bytes = len(content)
        for line in content.splitlines():
            try:
                change = _decode(line)
            except msgspec.DecodeError:
                continue
            slot = found.setdefault(change.tenant, {}).setdefault(change.start, Slot(change.start, change.newest))
            slot.newest = max(slot.newest, change.newest)
            slot.amounts[0] += change.requests
            slot.amounts[1] += change.tokens
        recent = {
            tenant: [
                slots[start] for start in sorted(slots) if slots[start].newest <= now < slots[start].newest + MINUTE
            ]
            for tenant, slots in found.items()
        }
        return {tenant: slots for tenant, slots in recent.items() if slots}

    def note(self, tenant: str, slot: Slot, requests: int, tokens: int) -> None:
        """A full disk costs exactness after a crash, not the request."""
        line = _line(tenant, slot, requests, tokens)
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self.num_bytes += os.write(self._fd, line)
        except OSError as error:
            count_error("limiter", error)

    def trim(self, slots: Iterable[tuple[str, Slot]]) -> None:
        """Replace a file that has grown long by one with these slots alone."""
        if self.num_bytes <= self._max_bytes:
            return
        content = b"".join(_line(tenant, slot, *slot.amounts) for tenant, slot in slots)
        new = self._path.with_suffix(".new")
        try:
            new.touch(0o600)
            new.write_bytes(content)
            new.replace(self._path)
        except OSError as error:
            count_error("limiter", error)
        else:
            self.close()
            self.num_bytes, self._max_bytes = len(content), max(MAX_BYTES, 2 * len(content))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _line(tenant: str, slot: Slot, requests: int, tokens: int) -> bytes:
    return _encode(_Change(tenant, slot.start, slot.newest, requests, tokens)) + b"\n"
