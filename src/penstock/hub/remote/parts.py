"""Files of a server, fetched in parts by several connections at once.

    NAME.part     the file as far as it is there: each part lies at its place
    NAME.parts    the file's size and version, and a line for each part that is on the disk

A process that is killed at any moment leaves these two, and the next one fetches the parts that are missing, as long as
the server has the same version of the file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.core.errors import ModelMissing
from penstock.core.private_files import FILE_MODE, make_private
from penstock.hub.disk import WATCH_EVERY_S, publish
from penstock.hub.progress import Progress

if TYPE_CHECKING:
    import httpx2

CONNECTIONS = 16
PART_BYTES = 16 << 20
TRIES = 5  # in a row that bring no byte of a part
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
PASSING = (408, 429, 500, 502, 503, 504)  # statuses that another try may not have


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # in the model's directory
    url: str
    num_bytes: int
    version: str  # changes when the file does: an ETag, or a time; empty: the server tells none
    takes_ranges: bool = True
    digest: str | None = None  # as in FileRecord


class Server(Protocol):
    """Requests to one server, with what opens it."""

    def get(
        self, url: str, headers: dict[str, str] | None = None, *, method: str = "GET"
    ) -> contextlib.AbstractContextManager[httpx2.Response]: ...


class TryAgain(Exception):
    """An answer that another try may not get; `after_s` as the server asks for."""

    def __init__(self, problem: str, after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.after_s = after_s


@dataclass(frozen=True)
class Part:
    number: int
    start: int
    end: int


class _Version(msgspec.Struct, frozen=True):
    num_bytes: int
    version: str
    part_bytes: int


_version_decoder = msgspec.json.Decoder(_Version)


class PartialFile:
    """A file of which some parts are there. Threads write parts of it at once."""

    def __init__(self, directory: Path, file: RemoteFile, part_bytes: int) -> None:
        self.file = file
        self._path = directory / file.name
        self._data_path = directory / f"{file.name}.part"
        self._journal_path = directory / f"{file.name}.parts"
        size = part_bytes if file.takes_ranges else max(file.num_bytes, 1)
        starts = range(0, max(file.num_bytes, 1), size)
        self._parts = [Part(number, at, min(at + size, file.num_bytes)) for number, at in enumerate(starts)]
        self._version = _Version(file.num_bytes, file.version, size)
        self._lock = threading.Lock()
        self._data = self._journal = -1
        there = self._numbers() if file.version and file.takes_ranges else set()
        self.missing = [part for part in self._parts if part.number not in there]
        self._num_missing = len(self.missing)
        self._is_new = not there

    @property
    def done_bytes(self) -> int:
        return self.file.num_bytes - sum(part.end - part.start for part in self.missing)

    def write(self, data: bytes, at: int) -> None:
        os.pwrite(self._opened(), data, at)

    def finished(self, part: Part) -> None:
        """The part is on the disk; with the last one the file gets its name."""
        data = self._opened()
        os.fdatasync(data)  # before the journal says so
        with self._lock:
            os.write(self._journal, f"{part.number}\n".encode())
            self._num_missing -= 1
            is_whole = not self._num_missing
        if is_whole:
            self.publish()

    def publish(self) -> None:
        self._opened()
        self.close()
        publish(self._data_path, self._path)
        self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            for descriptor in (self._data, self._journal):
                if descriptor >= 0:
                    os.close(descriptor)
            self._data = self._journal = -1

    def _opened(self) -> int:
        with self._lock:
            if self._data < 0:
                make_private(self._path.parent)
                flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if self._is_new else 0)
                self._data = os.open(self._data_path, flags, FILE_MODE)
                os.ftruncate(self._data, self.file.num_bytes)
                self._journal = os.open(self._journal_path, flags | os.O_APPEND, FILE_MODE)
                if self._is_new:
                    os.write(self._journal, msgspec.json.encode(self._version) + b"\n")
            return self._data

    def _numbers(self) -> set[int]:
        """Parts that are on the disk, of this version of the file."""
        try:
            head, *lines = self._journal_path.read_bytes().split(b"\n")[:-1]  # a line that was cut off has no end
            if _version_decoder.decode(head) != self._version:
                return set()
            if self._data_path.stat().st_size != self.file.num_bytes:
                return set()
            return {int(line) for line in lines}
        except (OSError, ValueError):
            return set()


class PartsFetch:
    """One fetch of several files into a directory."""

    def __init__(
        self,
        server: Server,
        directory: Path,
        files: Sequence[RemoteFile],
        *,
        part_bytes: int | None = None,
        connections: int | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server = server
        self._total_bytes = sum(file.num_bytes for file in files)
        missing = [file for file in files if not _is_there(directory / file.name, file)]
        self._partials = [PartialFile(directory, file, part_bytes or PART_BYTES) for file in missing]
        self._done_bytes = self._total_bytes - sum(each.file.num_bytes - each.done_bytes for each in self._partials)
        self._connections = connections or CONNECTIONS
        self._pause = pause
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def run(self, what: str, progress: Progress) -> None:
        """Raises the first error that another try does not mend; what is there by then stays for the next fetch."""
        with contextlib.ExitStack() as stack:
            for partial in self._partials:
                stack.callback(partial.close)
                if not partial.missing:
                    partial.publish()
            pool = stack.enter_context(ThreadPoolExecutor(self._connections, "fetch"))
            tasks = [pool.submit(self._fetch, partial, part) for partial in self._partials for part in partial.missing]
            try:
                self._watch(tasks, what, progress)
            except BaseException:
                self._ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        progress(what, self._total_bytes, self._total_bytes)

    def _watch(self, tasks: list[Future[None]], what: str, progress: Progress) -> None:
        pending = set(tasks)
        while pending:
            done, pending = wait(pending, timeout=WATCH_EVERY_S, return_when=FIRST_EXCEPTION)
            for task in done:
                task.result()
            progress(what, min(self._done_bytes, self._total_bytes - 1), self._total_bytes)

    def _fetch(self, partial: PartialFile, part: Part) -> None:
        import httpx2

        at, failures = part.start, 0
        while at < part.end and not self._ended.is_set():
            began_at, after_s = at, 0.0
            try:
                for chunk in self._chunks(partial.file, at, part.end):
                    partial.write(chunk, at)
                    at += len(chunk)
                    self._count(len(chunk))
                    if self._ended.is_set():
                        return
                problem: Exception = TryAgain("the connection ended early")
            except (httpx2.TransportError, TryAgain) as error:
                problem, after_s = error, getattr(error, "after_s", 0.0)
            if at == part.end:
                break
            failures = failures + 1 if at == began_at else 1
            if not partial.file.takes_ranges:  # from its beginning
                self._count(part.start - at)
                at = part.start
            if failures == TRIES:
                raise problem
            self._pause(min(max(FIRST_PAUSE_S * 2 ** (failures - 1), after_s), LONGEST_PAUSE_S))
        if not self._ended.is_set():
            partial.finished(part)

    def _chunks(self, file: RemoteFile, at: int, end: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={at}-{end - 1}"} if file.takes_ranges else {}
        with self._server.get(file.url, headers) as response:
            if response.status_code in PASSING:
                raise TryAgain(f"the server answers {response.status_code}", _asked_pause_s(response))
            expected = f"bytes {at}-{end - 1}/{file.num_bytes}"
            told = response.headers.get("content-range", "") if file.takes_ranges else expected
            if (
                response.status_code != (206 if file.takes_ranges else 200)
                or told != expected
                or (file.version and version_of(response) != file.version)
            ):
                raise ModelMissing(
                    f"{file.name} is not what it was when the download began: the server answers "
                    f"{response.status_code}; run the same again"
                )
            for chunk in response.iter_raw():
                yield chunk[: end - at]
                at += len(chunk)
                if at >= end:
                    return

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes


def version_of(response: httpx2.Response) -> str:
    """Tag that changes when the file does, as far as the server tells."""
    return str(response.headers.get("etag") or response.headers.get("last-modified") or "")


def _asked_pause_s(response: httpx2.Response) -> float:
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else 0.0


def _is_there(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.num_bytes
