"""Every choice of a replica and what came of it, written to a bounded log (`decisions` says what it holds).

Choices and outcomes are kept as they are and become bytes in a thread, a few times a second; the event loop pays for an
append. A log that the disk does not take fast enough loses entries, and counts them. The current file is moved on at a
quarter of `max_bytes`, and the oldest of four is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from penstock.gateway.decisions import LENGTH, MAGIC, NUM_FILES, decided, ended, file_names
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice

if TYPE_CHECKING:
    from penstock.gateway.recorder import RequestFacts

_INTERVAL_S = 0.2
_MAX_WAITING = 20_000  # entries
_BATCH = 64  # entries of one block: after each the event loop's thread gets its turn

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


class _Made(NamedTuple):
    at_s: float
    request: EdgeRequest
    choice: Choice
    now: float


class DecisionLog:
    """`decided` and `ended` belong to the event loop."""

    def __init__(self, path: Path, max_bytes: int = 256 << 20) -> None:
        self._path = path
        self._max_file_bytes = max_bytes // NUM_FILES
        self._waiting: deque[_Made | RequestFacts] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision log", daemon=True)
        self._file: IO[bytes] | None = None
        self.num_lost = 0

    def start(self) -> DecisionLog:
        self._thread.start()
        return self

    def decided(self, request: EdgeRequest, choice: Choice, now: float) -> None:
        """`now`: by the clock that the snapshots were taken by."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(_Made(time.time(), request, choice, now))
        else:
            self.num_lost += 1

    def ended(self, facts: RequestFacts) -> None:
        """Of a request that was sent somewhere; of others there is no choice to judge."""
        if facts.queue_s is None:
            return
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(facts)
        else:
            self.num_lost += 1

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._write()
        if self._file is not None:
            self._file.close()

    # -- the thread

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._write()

    def _write(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            entries = [decided(*one) if isinstance(one, _Made) else ended(one) for one in batch]
            block = zlib.compress(_encoder.encode(entries), 1)
            try:
                self._append(LENGTH.pack(len(block)) + block)
            except OSError as error:
                if not self.num_lost:
                    log.error("the decision log cannot be written: %s", error)
                self.num_lost += len(batch)

    def _append(self, block: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        if self._file.tell() and self._file.tell() + len(block) > self._max_file_bytes:
            self._file.close()
            self._move_on()
            self._file = self._path.open("ab")
        self._file.write(block if self._file.tell() else MAGIC + block)
        self._file.flush()

    def _move_on(self) -> None:
        names = file_names(self._path)
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(names[::-1], names[-2::-1], strict=False):
            if newer.exists():
                newer.rename(older)

    def __enter__(self) -> DecisionLog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
