"""Files of tenants: their rows in the store of tenants, and their bytes in the store of files, kept in step.

Everything here that waits does so in threads of its own; the event loop sees coroutines. Files are written and read by
chunks of a few megabytes, so however large one is, little of it is in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from uuid import uuid4

from penstock.api.batches import Page
from penstock.core.config import shown
from penstock.core.errors import (
    BodyTooLarge,
    FileNotFound,
    InvalidRequest,
    Overloaded,
    PenstockError,
    StoreUnavailable,
)
from penstock.gateway.batches.object_store import ObjectStore
from penstock.gateway.batches.settings import BatchSettings
from penstock.http.multipart import MultipartReader, boundary_of
from penstock.observe.background import count_error
from penstock.tenancy.files import Chunk, FileBook, StoredFile

CHUNK_BYTES = 4 << 20
MAX_UPLOADS = 16  # of a process at a time: each holds up to three chunks
_FORM_BYTES = 64 << 10  # of an upload that are not the file
_MAX_FILENAME = 200
_THREADS = 4
_MIN_TTL_S, _MAX_TTL_S = 3600, 2592000
_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


class FileStore:
    def __init__(self, book: FileBook, objects: ObjectStore, settings: BatchSettings) -> None:
        self.settings = settings
        self._book = book
        self._objects = objects
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="files")
        self._uploads: set[FileUpload] = set()

    def close(self) -> None:
        """Blocks until all that was begun is done."""
        self._threads.shutdown(wait=True)

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread. Raises PenstockError, also for what nobody expected."""
        try:
            work = partial(function, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except PenstockError:
            raise
        except RuntimeError as error:  # its threads are closed
            raise StoreUnavailable("the gateway is stopping") from error
        except Exception as error:
            log.exception("the store of files failed")
            raise StoreUnavailable("the store of files does not work") from error

    def soon(self, function: Callable[[], object]) -> None:
        """In a thread, though the loop may end before."""
        self._threads.submit(function)

    # -- reading

    async def find(self, tenant_id: str, file_id: str) -> StoredFile | None:
        return await self.blocking(self._book.find, tenant_id, file_id)

    async def page(self, tenant_id: str, purposes: Sequence[str], page: Page) -> list[StoredFile]:
        """One more than were asked for, if there are so many. Raises FileNotFound where it is to begin nowhere."""
        if not purposes:
            return []
        found = await self.blocking(
            self._book.page,
            tenant_id,
            purposes,
            after=page.after,
            limit=page.limit + 1,
            is_descending=page.is_descending,
        )
        if found is None:
            raise FileNotFound(f"after: there is no file '{shown(page.after or '')}'", param="after")
        return found

    async def chunks(self, file: StoredFile) -> AsyncIterator[bytes]:
        for chunk in file.chunks:
            yield await self.blocking(self._objects.get, chunk.name)

    def read(self, chunk: Chunk) -> bytes:
        """Blocks."""
        return self._objects.get(chunk.name)

    # -- writing

    def open_upload(self, tenant_id: str, content_type: bytes, resume: Callable[[], None]) -> FileUpload:
        boundary = boundary_of(content_type)
        if len(self._uploads) >= MAX_UPLOADS:
            raise Overloaded("too many files are being uploaded", reason="uploads", retry_after_s=2.0)
        upload = FileUpload(self, tenant_id, boundary, resume)
        self._uploads.add(upload)
        return upload

    def upload_over(self, upload: FileUpload) -> None:
        self._uploads.discard(upload)

    async def begin(self, tenant_id: str, file_id: str) -> None:
        await self.blocking(self._book.begin, tenant_id, file_id, self.settings.file_limits)

    async def append(self, tenant_id: str, file_id: str, number: int, data: bytes) -> None:
        """The next chunk of a file that is being uploaded. Its row has it first: no object is without one."""
        chunk = Chunk(f"{file_id}/{number:06d}", len(data))
        await self.blocking(self._book.add_chunk, tenant_id, file_id, chunk, self.settings.file_limits)
        await self.blocking(self._objects.put, chunk.name, data)

    async def finish(
        self, tenant_id: str, file_id: str, *, purpose: str, filename: str, ttl_s: float | None = None
    ) -> StoredFile:
        ttl_s = self.settings.keep_s if ttl_s is None else min(ttl_s, self.settings.keep_s)
        return await self.blocking(
            self._book.finish, tenant_id, file_id, purpose=purpose, filename=filename, ttl_s=ttl_s
        )

    async def abandon(self, tenant_id: str, file_id: str) -> None:
        found = await self.blocking(self._book.abandon, tenant_id, file_id)
        if found is not None:
            await self.blocking(self._remove, found)

    async def write(
        self, tenant_id: str, data: list[bytes], *, purpose: str, filename: str, ttl_s: float
    ) -> StoredFile:
        """A file of lines that are here already."""
        file_id = new_file_id()
        await self.begin(tenant_id, file_id)
        try:
            part, size, number = list[bytes](), 0, 0
            for line in data:
                part.append(line)
                size += len(line)
                if size >= CHUNK_BYTES:
                    await self.append(tenant_id, file_id, number, b"".join(part))
                    part, size, number = [], 0, number + 1
            if part:
                await self.append(tenant_id, file_id, number, b"".join(part))
            return await self.blocking(
                self._book.finish, tenant_id, file_id, purpose=purpose, filename=filename, ttl_s=ttl_s
            )
        except PenstockError:
            await self.abandon(tenant_id, file_id)
            raise

    def put(self, name: str, data: bytes) -> Chunk:
        """An object that is to be a chunk of a batch's results. Blocks."""
        self._objects.put(name, data)
        return Chunk(name, len(data))

    def drop(self, name: str) -> None:
        """Blocks."""
        self._objects.delete(name)

    # -- deleting

    async def delete(self, tenant_id: str, file_id: str) -> bool:
        """False: there is none."""
        found = await self.blocking(self._book.begin_delete, tenant_id, file_id)
        if found is None:
            return False
        await self.blocking(self._remove, found)
        return True

    def sweep(self) -> int:
        """Deletes what nobody keeps any longer; how many files those were. Blocks."""
        found = self._book.sweep()
        for file in found:
            self._remove(file)
        return len(found)

    def _remove(self, file: StoredFile) -> None:
        for chunk in file.chunks:
            self._objects.delete(chunk.name)
        self._book.gone(file)


class FileUpload:
    """A form that arrives with a file in it: an `http.uploads.Upload`. Full chunks are written while the next ones
    come; the client is read no faster than they can be."""

    def __init__(self, files: FileStore, tenant_id: str, boundary: bytes, resume: Callable[[], None]) -> None:
        self.tenant_id = tenant_id
        self.max_bytes = files.settings.max_file_bytes + _FORM_BYTES
        self._files = files
        self._resume = resume
        self._reader = MultipartReader(boundary, "file", self._take)
        self._file_id = new_file_id()
        self._buffer = bytearray()
        self._num_bytes = 0
        self._chunks: deque[bytes] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._num_written = 0
        self._is_begun = False
        self._error: PenstockError | None = None

    @property
    def is_full(self) -> bool:
        return len(self._chunks) > 1

    def write(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        self._reader.feed(data)

    def lost(self) -> None:
        self._chunks.clear()
        self._files.upload_over(self)
        asyncio.get_running_loop().create_task(self._give_up())

    async def complete(self) -> StoredFile:
        """The body is at its end. Raises PenstockError, and leaves nothing behind then."""
        try:
            self._reader.close()
            filename, ttl_s = self._asked()
            self._cut(1)
            if self._writer is not None:
                await self._writer
            if self._error is not None:
                raise self._error
            return await self._files.finish(
                self.tenant_id, self._file_id, purpose="batch", filename=filename, ttl_s=ttl_s
            )
        except PenstockError:
            await self._give_up()
            raise
        finally:
            self._files.upload_over(self)

    def _asked(self) -> tuple[str, float | None]:
        """Name and lifetime. Raises InvalidRequest."""
        fields, filename = self._reader.fields, self._reader.filename
        for name in fields.keys() - _FIELDS:
            raise InvalidRequest(f"{shown(name)}: a form with a file has no such field", param=shown(name))
        if fields.get("purpose") != "batch":
            raise InvalidRequest("purpose: this server takes files for batches alone: 'batch'", param="purpose")
        if filename is None or not self._num_bytes:
            raise InvalidRequest("file: the form has no file, or an empty one", param="file")
        seconds = fields.get("expires_after[seconds]")
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise InvalidRequest("expires_after[anchor]: expected 'created_at'", param="expires_after[anchor]")
        if seconds is None:
            return _cleaned(filename), None
        if not seconds.isascii() or not seconds.isdigit() or not _MIN_TTL_S <= int(seconds[:9]) <= _MAX_TTL_S:
            problem = f"expires_after[seconds]: expected {_MIN_TTL_S} to {_MAX_TTL_S}"
            raise InvalidRequest(problem, param="expires_after[seconds]")
        return _cleaned(filename), float(seconds)

    def _take(self, data: bytes) -> None:
        self._num_bytes += len(data)
        most = self._files.settings.max_file_bytes
        if self._num_bytes > most:
            raise BodyTooLarge(f"the file is larger than the limit of {most} bytes (batches.max_file_bytes)")
        self._buffer += data
        self._cut(CHUNK_BYTES)

    def _cut(self, at_least: int) -> None:
        while len(self._buffer) >= at_least:
            self._chunks.append(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]
        if self._chunks and (self._writer is None or self._writer.done()):
            self._writer = asyncio.get_running_loop().create_task(self._write_out())

    async def _write_out(self) -> None:
        try:
            if not self._is_begun:
                self._is_begun = True
                await self._files.begin(self.tenant_id, self._file_id)
            while self._chunks:
                await self._files.append(self.tenant_id, self._file_id, self._num_written, self._chunks[0])
                self._num_written += 1
                if self._chunks:  # else it was lost meanwhile
                    self._chunks.popleft()
                self._resume()
        except PenstockError as error:
            self._error = error
            self._chunks.clear()
            self._resume()  # what comes next is told the error

    async def _give_up(self) -> None:
        try:
            if self._writer is not None:
                await self._writer
            if self._is_begun:
                await self._files.abandon(self.tenant_id, self._file_id)
        except PenstockError as error:  # the next sweep finds it
            count_error("store of files", error)


def new_file_id() -> str:
    return f"file-{uuid4().hex}"


def _cleaned(filename: str) -> str:
    """The name of a client's file without a path, as it may be shown."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(one for one in name if one.isprintable())[:_MAX_FILENAME] or "file"
