"""The rows of a batch, read from its input line by line, and checked before the first of them is run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from penstock.api.batches import BatchRow, RowProblem, read_row
from penstock.core.config import shown
from penstock.gateway.batches.file_store import FileStore
from penstock.tenancy.batches import RowError
from penstock.tenancy.files import StoredFile

MAX_LINE_BYTES = 8 << 20  # as the body of a request
_MAX_ERRORS = 100  # that are told


class Lines:
    """Pieces of text in, whole lines out, with their numbers from 1 on; empty ones count and are left out."""

    def __init__(self) -> None:
        self._held = b""
        self._number = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            self._number += 1
            if line and not line.isspace():
                yield self._number, line
        if len(self._held) > MAX_LINE_BYTES:
            yield self._number + 1, self._held
            self._held = b""

    def close(self) -> Iterator[tuple[int, bytes]]:
        if self._held and not self._held.isspace():
            yield self._number + 1, self._held


class CheckedInput:
    """The findings of a look at all lines."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.errors: list[RowError] = []
        self.models: dict[str, int] = {}  # and the first line that asks for it


def check(files: FileStore, file: StoredFile, endpoint: str, max_rows: int) -> CheckedInput:
    """Blocks. Stops where nothing more can be learned: at too many errors, or too many rows."""
    found, seen = CheckedInput(), dict[str, int]()
    for number, line in _all_lines(files, file):
        found.num_rows += 1
        if found.num_rows > max_rows:
            found.errors.append(RowError("too_many_rows", f"a batch has at most {max_rows} rows", number))
            return found
        try:
            if len(line) > MAX_LINE_BYTES:
                raise RowProblem("line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes")
            row = read_row(number, line, endpoint)
            if (first := seen.setdefault(row.custom_id, number)) != number:
                problem = f"custom_id: '{shown(row.custom_id)}' is the one of line {first}, too"
                raise RowProblem("duplicate_custom_id", problem, "custom_id")
            found.models.setdefault(row.model, number)
        except RowProblem as problem:
            found.errors.append(RowError(problem.code, problem.message, number, problem.param))
            if len(found.errors) >= _MAX_ERRORS or problem.code == "line_too_long":
                return found
    if not found.num_rows:
        found.errors.append(RowError("empty_file", "the input has no rows"))
    return found


async def rows(files: FileStore, file: StoredFile, endpoint: str) -> AsyncIterator[BatchRow]:
    """Rows of an input that was found to be good."""
    lines = Lines()
    async for data in files.chunks(file):
        for number, line in lines.feed(data):
            yield read_row(number, line, endpoint)
    for number, line in lines.close():
        yield read_row(number, line, endpoint)


def _all_lines(files: FileStore, file: StoredFile) -> Iterator[tuple[int, bytes]]:
    lines = Lines()
    for chunk in file.chunks:
        yield from lines.feed(files.read(chunk))
    yield from lines.close()
