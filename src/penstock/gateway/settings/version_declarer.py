"""Tells the store which versions there are, by a file that was read again or by their pools, so that their shares can
be changed; and learns which shares those have that no file names.

Belongs to the event loop; the store is asked in a thread, again until it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.observe.background import count_error
from penstock.tenancy.routes import Declared

_AGAIN_S = 2.0


class VersionBook(Protocol):
    """Blocks."""

    def declare(self, routes: Iterable[Declared]) -> None: ...

    def add_versions(self, routes: Iterable[Declared]) -> list[Declared]: ...


class VersionDeclarer:
    def __init__(self, book: VersionBook, adopt: Callable[[list[Declared]], None], again_s: float = _AGAIN_S) -> None:
        """`adopt` is told the routes of found versions as the store has them."""
        self._book = book
        self._adopt = adopt
        self._again_s = again_s
        self._file: list[Declared] = []  # that the store is still to be told
        self._found: list[Declared] = []
        self._is_due = False
        self._task: asyncio.Task[None] | None = None

    def declare(self, routes: list[Declared]) -> None:
        """Routes of a file that was read again. Found versions are added to them anew."""
        self._file = routes
        self._begin()

    def add(self, routes: list[Declared]) -> None:
        """All routes with versions that were found, as they are now."""
        self._found = routes
        self._begin()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._is_due = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._is_due:
                self._is_due = False
                file, self._file = self._file, []
                try:
                    self._adopt(await asyncio.to_thread(self._tell, file, self._found))
                except Exception as error:  # whatever it is, the store is still to hear of them
                    count_error("version declarer", error)
                    self._file, self._is_due = self._file or file, True
                    await asyncio.sleep(self._again_s)
        finally:
            self._task = None

    def _tell(self, file: list[Declared], found: list[Declared]) -> list[Declared]:
        self._book.declare(file)
        return self._book.add_versions(found)
