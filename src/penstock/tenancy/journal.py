"""A gateway's write-ahead file of usage: what was recorded and is not yet in the store survives `kill -9`.

    DIRECTORY/1.a.jsonl  1.b.jsonl  1.lock      of one gateway; others of the same host have 2, 3, …

A record is one write to a file, which the kernel keeps when the process dies; nothing is synced, so a power failure may
take the last seconds. There are two files: while what one holds is written to the store, records go to the other, and
the first is emptied when the store has confirmed all of it. Their size is bounded: beyond it a record is in memory
alone, as all were without a journal, and counted.

A gateway that starts takes what dead ones have left. It may be in the store already; request ids tell.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.core.errors import ConfigError
from penstock.observe.background import count_error
from penstock.tenancy.usage import Usage

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 32 << 20  # some 150 000 requests
MAX_GATEWAYS = 256  # of one host and one store

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Usage).decode


class Journal:
    """`append` and `switch` are called under a lock of the ledger's; all else belongs to its writing thread."""

    def __init__(self, directory: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._slots: list[_Slot] = []  # this gateway's own, and until `clear` those of dead ones
        self._files: list[int] = []
        self._sizes = [0, 0]
        self._current = 0
        self.num_left_out = 0  # records that are in memory alone

    def open(self) -> None:
        """Raises ConfigError where no file can be written."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for number in range(1, MAX_GATEWAYS + 1):
                path = self._directory / f"{number}.lock"
                if self._slots and not path.exists():
                    break
                if (lock := _locked(path)) is not None:
                    files = [self._directory / f"{number}.{letter}.jsonl" for letter in "ab"]
                    self._slots.append(_Slot(lock, files))
            if not self._slots:
                raise ConfigError(f"{MAX_GATEWAYS} gateways write their usage to {self._directory} already")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._files = [os.open(path, flags, 0o600) for path in self._slots[0].files]
            self._sizes = [os.fstat(file).st_size for file in self._files]
        except OSError as error:
            raise ConfigError(f"usage cannot be written to {self._directory}: {error.strerror}") from None

    def left_behind(self) -> list[Usage]:
        """Records in this gateway's files, from before, and in those of dead gateways; each once."""
        found: dict[str, Usage] = {}
        for path in self._left_files():
            num_torn = 0
            for line in filter(None, path.read_bytes().split(b"\n")):
                try:
                    usage = _decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    num_torn += 1
                else:
                    found[usage.request_id] = usage
            if num_torn:
                log.error("%s has %d records that cannot be read", path, num_torn)
        return list(found.values())

    def clear(self) -> None:
        """All that was left behind is in the store."""
        for path in self._left_files():
            os.truncate(path, 0)
        self._sizes = [0, 0]
        while len(self._slots) > 1:
            os.close(self._slots.pop().lock)

    def append(self, usage: Usage) -> None:
        """Never raises: a request must not fail for it."""
        try:
            line = b"\n" + _encode(usage)  # a line that was torn by a full disk does not spoil the next
            if self._sizes[self._current] + len(line) > self._max_file_bytes:
                self.num_left_out += 1
                return
            num_written = os.write(self._files[self._current], line)
            self._sizes[self._current] += num_written
            self.num_left_out += num_written < len(line)
        except Exception as error:  # no space is left, or it cannot be put into words
            self.num_left_out += 1
            count_error("usage journal", error)

    def switch(self) -> None:
        """Records go to the other file, if that is empty: this one holds none but those that are written now."""
        if self._sizes[self._current] and not self._sizes[1 - self._current]:
            self._current = 1 - self._current

    def confirm(self) -> None:
        """All that was recorded before the last `switch` is in the store."""
        other = 1 - self._current
        if self._sizes[other]:
            os.ftruncate(self._files[other], 0)
            self._sizes[other] = 0

    def close(self) -> None:
        for fd in (*self._files, *(slot.lock for slot in self._slots)):
            os.close(fd)
        self._files, self._slots = [], []

    def _left_files(self) -> list[Path]:
        return [path for slot in self._slots for path in slot.files if path.exists()]


class _Slot(NamedTuple):
    lock: int
    files: list[Path]


def _locked(path: Path) -> int | None:
    """None: a living process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
