"""Files that a command writes for its user, and one line for what stands against that."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from penstock.core.errors import ConfigError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file: a failed write, unlike a failed open, does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, content: str | bytes) -> None:
    with naming(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: object) -> None:
    write_file(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def check_outputs(*paths: Path | None) -> None:
    """Raise for a file that could not be written: told before the work, not after it."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no directory {path.parent}")
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            is_read_only = os.statvfs(path.parent).f_flag & os.ST_RDONLY
            raise ConfigError(f"cannot write {path}: {os.strerror(errno.EROFS if is_read_only else errno.EACCES)}")


def in_words(error: OSError, *, instead: str = "write elsewhere") -> str:
    """One line: the file, where one is named, the reason, and what helps where a disk is full or read-only."""
    reason = error.strerror or str(error) or type(error).__name__
    line = f"{error.filename}: {reason}" if error.filename is not None else reason
    if error.errno in _NO_ROOM and error.filename is None:
        return f"cannot write the output: {reason}"
    if error.errno in _NO_ROOM:
        return f"{line}; free some space or {instead}"
    return f"{line}; {instead}" if error.errno == errno.EROFS else line
