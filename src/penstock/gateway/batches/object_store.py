"""The store of files: objects by name, in a directory or in an S3-compatible store that every gateway reaches.

An object is written once, whole, under a name that nobody else uses, and never changes. What a file is made of is kept
in the store of tenants (`tenancy.files`); here are only bytes. Everything blocks: for threads.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from penstock.core.errors import ConfigError, InvalidValue, StoreCorrupt, StoreUnavailable
from penstock.core.private_files import make_private, open_private

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(/[A-Za-z0-9][A-Za-z0-9_-]*)?")


class ObjectStore(Protocol):
    """Every method raises StoreUnavailable when the store does not answer; the next call tries anew."""

    def put(self, name: str, data: bytes) -> None:
        """On disk, whole, when it returns. Twice is once."""

    def get(self, name: str) -> bytes:
        """Raises StoreCorrupt where there is no such object."""

    def delete(self, name: str) -> None:
        """One that is not there is deleted already."""


class DirectoryStore:
    """Objects as files of a directory; for several hosts, one that all of them mount."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            make_private(path.parent)
            whole = path.with_name(f".{uuid4().hex}")
            try:
                with open_private(whole, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                whole.replace(path)
            finally:
                whole.unlink(missing_ok=True)
            _sync(path.parent)
        except OSError as error:
            raise StoreUnavailable(f"the store of files {self._root} does not work: {error.strerror}") from error

    def get(self, name: str) -> bytes:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            raise StoreCorrupt(f"the store of files {self._root} has no object {name}") from None
        except OSError as error:
            raise StoreUnavailable(f"the store of files {self._root} does not work: {error.strerror}") from error

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"the store of files {self._root} does not work: {error.strerror}") from error
        with contextlib.suppress(OSError):  # not empty yet
            path.parent.rmdir()

    def _path(self, name: str) -> Path:
        return self._root / checked_name(name)


def checked_name(name: str) -> str:
    """Names are made here and kept in the store of tenants. Raises InvalidValue for one that leads elsewhere."""
    if not _NAME.fullmatch(name):
        raise InvalidValue("that is no name of an object")
    return name


def object_store(place: str) -> ObjectStore:
    """The store at a URL, s3://BUCKET/PREFIX?endpoint=…, or in a directory. Raises ConfigError."""
    if place.startswith("s3://"):
        from penstock.gateway.batches.s3 import s3_store

        return s3_store(place, os.environ)
    if "://" in place and not place.startswith("file://"):
        raise ConfigError("a store of files is a directory, or s3://BUCKET/PREFIX", param="batches.files")
    root = Path(place.removeprefix("file://")).expanduser()
    if not root.is_absolute():
        raise ConfigError(f"the directory of files is an absolute path, not '{place}'", param="batches.files")
    return DirectoryStore(root)


def _sync(directory: Path) -> None:
    """Makes what was put into a directory outlive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
