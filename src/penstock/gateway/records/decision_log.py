"""Every choice of a replica and what came of it, written to a bounded log (`decisions` says what it holds).

The current file is moved on at a quarter of `max_bytes`, and the oldest of four is dropped. A log has one writer.
"""

from __future__ import annotations

import fcntl
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO

import msgspec

from penstock.core.private_files import make_private, open_private
from penstock.gateway.records.decisions import LENGTH, MAGIC, NUM_FILES, Decided, decided, ended, file_names
from penstock.gateway.records.facts import RequestFacts
from penstock.observe.backlog import Backlog
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice

_MAX_WAITING = 20_000  # entries
_BATCH = 64  # entries of one block

_encoder = msgspec.msgpack.Encoder()


class _Made(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    request: EdgeRequest
    choice: Choice
    now: float
    route: str
    version: str
    rule: str


class DecisionLog(Backlog["_Made | RequestFacts"]):
    """`decided` and `ended` belong to the event loop."""

    def __init__(self, path: Path, max_bytes: int = 256 << 20) -> None:
        super().__init__("decision log", most=_MAX_WAITING, batch=_BATCH)
        self._path = path
        self._max_file_bytes = max_bytes // NUM_FILES
        self._file: IO[bytes] | None = None

    def decided(
        self, request: EdgeRequest, choice: Choice, now: float, *, route: str = "", version: str = "", rule: str = ""
    ) -> None:
        """`now`: by the clock that the snapshots were taken by; the rest: how it came to its pool."""
        self.put(_Made(time.time(), request, choice, now, route, version, rule))

    def ended(self, facts: RequestFacts) -> None:
        """Writes the end of a request that was sent somewhere; for others there is no choice to judge."""
        if facts.queue_s is not None:
            self.put(facts)

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()

    # -- the thread

    def write(self, batch: list[_Made | RequestFacts]) -> None:
        entries = [ended(one) if isinstance(one, RequestFacts) else _decided(one) for one in batch]
        block = zlib.compress(_encoder.encode(entries), 1)
        self._append(LENGTH.pack(len(block)) + block)

    def _append(self, block: bytes) -> None:
        if self._file is None:
            make_private(self._path.parent)
            self._file = open_private(self._path, "ab")
        if self._file.tell() and self._file.tell() + len(block) > self._max_file_bytes:
            self._file.close()
            self._move_on()
            self._file = open_private(self._path, "ab")
        self._file.write(block if self._file.tell() else MAGIC + block)
        self._file.flush()

    def _move_on(self) -> None:
        names = file_names(self._path)
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(names[::-1], names[-2::-1], strict=False):
            if newer.exists():
                newer.rename(older)


def _decided(made: _Made) -> Decided:
    return decided(made.at_s, made.request, made.choice, made.now, made.route, made.version, made.rule)


@contextmanager
def path_of_its_own(directory: Path, name: str) -> Iterator[Path]:
    """Path of a log that no other process writes meanwhile: NAME.log, or if that is taken NAME-2.log and so on."""
    make_private(directory)
    for number in count(1):
        found = directory / (f"{name}.log" if number == 1 else f"{name}-{number}.log")
        with open_private(found.with_suffix(".lock"), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield found
            return
