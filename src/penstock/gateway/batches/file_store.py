"""Files of tenants: their rows in the store of tenants, and their bytes in the store of files, kept in step.

Everything here that waits does so in threads of its own; the event loop sees coroutines. Files are written and read by
chunks of a few megabytes, so however large one is, little of it is in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from uuid import uuid4

from penstock.api.batches import Page
from penstock.core.config import shown
from penstock.core.errors import (
    FileNotFound,
    Overloaded,
    PenstockError,
    StoreUnavailable,
)
from penstock.gateway.batches.object_store import ObjectStore
from penstock.gateway.batches.settings import BatchSettings
from penstock.tenancy.files import Chunk, FileBook, StoredFile

CHUNK_BYTES = 4 << 20
MAX_UPLOADS = 16  # of a process at a time: each holds up to three chunks
_THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


class FileStore:
    def __init__(self, book: FileBook, objects: ObjectStore, settings: BatchSettings) -> None:
        self.settings = settings
        self._book = book
        self._objects = objects
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="files")
        self._uploads: set[object] = set()

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

    def upload_begins(self, upload: object) -> None:
        """Raises Overloaded while too many others do."""
        if len(self._uploads) >= MAX_UPLOADS:
            raise Overloaded("too many files are being uploaded", reason="uploads", retry_after_s=2.0)
        self._uploads.add(upload)

    def upload_over(self, upload: object) -> None:
        self._uploads.discard(upload)

    async def begin(self, tenant_id: str, file_id: str) -> None:
        await self.blocking(self._book.begin, tenant_id, file_id, self.settings.file_limits)

    async def append(self, tenant_id: str, file_id: str, number: int, data: bytes) -> None:
        """The next chunk of a file that is being uploaded. Its row has it first: no object is without one."""
        chunk = Chunk(f"{file_id}/{number:06d}", len(data))
        await self.blocking(self._book.add_chunk, tenant_id, file_id, chunk, self.settings.file_limits)
        await self.blocking(self._objects.put, chunk.name, data)

    async def finish(self, tenant_id: str, file_id: str, *, purpose: str, filename: str, ttl_s: float) -> StoredFile:
        return await self.blocking(
            self._book.finish, tenant_id, file_id, purpose=purpose, filename=filename, ttl_s=ttl_s
        )

    async def abandon(self, tenant_id: str, file_id: str) -> None:
        found = await self.blocking(self._book.abandon, tenant_id, file_id)
        if found is not None:
            await self.blocking(self._remove, found)

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


def new_file_id() -> str:
    return f"file-{uuid4().hex}"
