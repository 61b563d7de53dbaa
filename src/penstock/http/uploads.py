"""Bodies that are taken piece by piece, as they arrive, because they are too large to be held. Knows no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.http.message import Request


class Upload(Protocol):
    """The taker of the pieces of one body. Called from the event loop, and never again once `lost` was."""

    max_bytes: int  # of the whole body

    @property
    def is_full(self) -> bool:
        """Whether no more is to be read until `resume`, which whoever opened the upload was given, is called."""

    def write(self, data: bytes) -> None:
        """Raises PenstockError where the rest is not wanted: the error is the answer."""

    def lost(self) -> None:
        """The body never comes to its end."""


class Uploads(Protocol):
    """The paths whose bodies are taken so. A request that has arrived goes to the application as others do, with its
    upload in place of its body."""

    paths: frozenset[bytes]

    def open(self, head: Request, resume: Callable[[], None]) -> Upload:
        """Asked when a POST's head is here, before its body is. Raises PenstockError where that is not wanted."""
