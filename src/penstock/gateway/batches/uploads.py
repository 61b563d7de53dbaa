"""Bodies that become files while they arrive: a form with a file in it, and a batch of messages.

Each is an `http.uploads.Upload`. Full chunks are written while the next ones come; the client is read no faster than
they can be, and what is wrong is told as soon as it is seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from penstock.api import batches as wire
from penstock.api.json_members import JsonMembers
from penstock.core.config import shown
from penstock.core.errors import BodyTooLarge, InvalidRequest, PenstockError
from penstock.gateway.batches.file_store import CHUNK_BYTES, FileStore, new_file_id
from penstock.gateway.batches.input import MAX_LINE_BYTES
from penstock.http.multipart import MultipartReader, boundary_of
from penstock.observe.background import count_error
from penstock.tenancy.files import StoredFile

_FORM_BYTES = 64 << 10  # of an upload that are not the file
_MAX_FILENAME = 200
_MIN_TTL_S, _MAX_TTL_S = 3600, 2592000
_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}


class ChunkWriter:
    """A file that is being written, chunk by chunk."""

    def __init__(self, files: FileStore, tenant_id: str, resume: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._files = files
        self._tenant_id = tenant_id
        self._resume = resume
        self._file_id = new_file_id()
        self._buffer = bytearray()
        self._chunks: deque[bytes] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._num_written = 0
        self._is_begun = False
        self._error: PenstockError | None = None

    @property
    def is_full(self) -> bool:
        return len(self._chunks) > 1

    def write(self, data: bytes) -> None:
        """Raises what went wrong since the last call, and BodyTooLarge."""
        if self._error is not None:
            raise self._error
        self.num_bytes += len(data)
        most = self._files.settings.max_file_bytes
        if self.num_bytes > most:
            raise BodyTooLarge(f"the file is larger than the limit of {most} bytes (batches.max_file_bytes)")
        self._buffer += data
        self._cut(CHUNK_BYTES)

    async def finish(self, *, purpose: str, filename: str, ttl_s: float) -> StoredFile:
        """Writes what is left; from now on the file is there."""
        self._cut(1)
        if self._writing is not None:
            await self._writing
        if self._error is not None:
            raise self._error
        return await self._files.finish(self._tenant_id, self._file_id, purpose=purpose, filename=filename, ttl_s=ttl_s)

    async def give_up(self) -> None:
        """Leaves nothing behind."""
        self._chunks.clear()
        try:
            if self._writing is not None:
                await self._writing
            if self._is_begun:
                await self._files.abandon(self._tenant_id, self._file_id)
        except PenstockError as error:  # the next sweep finds it
            count_error("store of files", error)

    def _cut(self, at_least: int) -> None:
        while len(self._buffer) >= at_least:
            self._chunks.append(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]
        if self._chunks and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._write_out())

    async def _write_out(self) -> None:
        try:
            if not self._is_begun:
                self._is_begun = True
                await self._files.begin(self._tenant_id, self._file_id)
            while self._chunks:
                await self._files.append(self._tenant_id, self._file_id, self._num_written, self._chunks[0])
                self._num_written += 1
                if self._chunks:  # else it was given up meanwhile
                    self._chunks.popleft()
                self._resume()
        except PenstockError as error:
            self._error = error
            self._chunks.clear()
            self._resume()  # what comes next is told the error


class _BodyUpload:
    """The base of both kinds: it tells of their end."""

    def __init__(self, files: FileStore, tenant_id: str, resume: Callable[[], None]) -> None:
        self.tenant_id = tenant_id
        self.max_bytes = files.settings.max_file_bytes + _FORM_BYTES
        self._files = files
        self._writer = ChunkWriter(files, tenant_id, resume)
        files.upload_begins(self)

    @property
    def is_full(self) -> bool:
        return self._writer.is_full

    def lost(self) -> None:
        self._files.upload_over(self)
        asyncio.get_running_loop().create_task(self._writer.give_up())


class FileUpload(_BodyUpload):
    """A form with fields and a file."""

    def __init__(self, files: FileStore, tenant_id: str, content_type: bytes, resume: Callable[[], None]) -> None:
        boundary = boundary_of(content_type)
        super().__init__(files, tenant_id, resume)
        self._reader = MultipartReader(boundary, "file", self._writer.write)

    def write(self, data: bytes) -> None:
        self._reader.feed(data)

    async def complete(self) -> StoredFile:
        """The file, once the body is at its end. Raises PenstockError, and leaves nothing behind then."""
        try:
            self._reader.close()
            filename, ttl_s = self._asked()
            return await self._writer.finish(purpose="batch", filename=filename, ttl_s=ttl_s)
        except PenstockError:
            await self._writer.give_up()
            raise
        finally:
            self._files.upload_over(self)

    def _asked(self) -> tuple[str, float]:
        """Name and lifetime. Raises InvalidRequest."""
        fields, filename, keep_s = self._reader.fields, self._reader.filename, self._files.settings.keep_s
        for name in fields.keys() - _FIELDS:
            raise InvalidRequest(f"{shown(name)}: a form with a file has no such field", param=shown(name))
        if fields.get("purpose") != "batch":
            raise InvalidRequest("purpose: this server takes files for batches alone: 'batch'", param="purpose")
        if filename is None or not self._writer.num_bytes:
            raise InvalidRequest("file: the form has no file, or an empty one", param="file")
        seconds = fields.get("expires_after[seconds]")
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise InvalidRequest("expires_after[anchor]: expected 'created_at'", param="expires_after[anchor]")
        if seconds is None:
            return _cleaned(filename), keep_s
        if not seconds.isascii() or not seconds.isdigit() or not _MIN_TTL_S <= int(seconds[:9]) <= _MAX_TTL_S:
            problem = f"expires_after[seconds]: expected {_MIN_TTL_S} to {_MAX_TTL_S}"
            raise InvalidRequest(problem, param="expires_after[seconds]")
        return _cleaned(filename), min(float(seconds), keep_s)


class ReceivedMessages(NamedTuple):
    file: StoredFile  # a row to a line
    num_rows: int


class MessagesUpload(_BodyUpload):
    """The body of POST /v1/messages/batches. What is wrong with a row is told at once, as Anthropic does."""

    def __init__(self, files: FileStore, tenant_id: str, resume: Callable[[], None]) -> None:
        super().__init__(files, tenant_id, resume)
        self._members = JsonMembers("requests", self._take, MAX_LINE_BYTES)
        self._custom_ids: set[str] = set()

    def write(self, data: bytes) -> None:
        self._members.feed(data)

    async def complete(self, filename: str, ttl_s: float) -> ReceivedMessages:
        """The messages that were received, once all of them are here, as a form has it."""
        try:
            self._members.close()
            if not self._custom_ids:
                raise InvalidRequest("requests: a batch has at least one", param="requests")
            file = await self._writer.finish(purpose="message_batch", filename=filename, ttl_s=ttl_s)
            return ReceivedMessages(file, len(self._custom_ids))
        except PenstockError:
            await self._writer.give_up()
            raise
        finally:
            self._files.upload_over(self)

    def _take(self, member: bytes) -> None:
        number = len(self._custom_ids)
        where, most = f"requests.{number}", self._files.settings.max_rows
        if number >= most:
            raise InvalidRequest(f"requests: a batch has at most {most}", param="requests")
        line = member.replace(b"\n", b" ").replace(b"\r", b" ")  # strings of JSON have none: these are between values
        try:
            row = wire.read_row(number + 1, line, wire.MESSAGES)
        except wire.RowProblem as problem:
            raise InvalidRequest(f"{where}: {problem.message}", param=where) from None
        if row.custom_id in self._custom_ids:
            raise InvalidRequest(f"{where}.custom_id: '{row.custom_id}' is there twice", param=f"{where}.custom_id")
        self._custom_ids.add(row.custom_id)
        self._writer.write(line + b"\n")


def _cleaned(filename: str) -> str:
    """The name of a client's file without a path, as it may be shown."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(one for one in name if one.isprintable())[:_MAX_FILENAME] or "file"
