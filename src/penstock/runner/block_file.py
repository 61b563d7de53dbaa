"""The file of one KV block: a header that says what it is, the block's bytes, and checksums of both.

A file that does not say exactly what is expected, or whose checksum is another, is damaged: it is never used. CRC-32 is
the fastest that Python brings (1.4 GB/s of a core here; BLAKE2b 0.5); it is against accidents, and whoever could forge
one can read the memory of the engine too, since the files are its user's alone. A file gets its name once it is whole.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from penstock.core.hashing import BlockHash
from penstock.core.private_files import FILE_MODE

VERSION = 1
SUFFIX = ".kv"
PARTIAL = ".part"
_MAGIC = b"penstkv\n"
_FIELDS = struct.Struct("<8sI16s16s16s?QQI")  # magic … routing hash, bytes, their checksum
_SUM = struct.Struct("<I")
HEADER_BYTES = 128
_HASH_BYTES = 16

Parts = Sequence[memoryview]  # of a block in memory, in their order


class DamagedFile(Exception):
    """It is not what was written, or not by us."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block as its file's name says it."""

    own: BlockHash
    parent: BlockHash
    routing_hash: int | None = None  # of the routing block that it ends

    @property
    def file_name(self) -> str:
        end = f"-{self.routing_hash:016x}" if self.routing_hash is not None else ""
        return f"{self.own.hex()}-{self.parent.hex()}{end}{SUFFIX}"

    @classmethod
    def parse(cls, file_name: str) -> BlockName | None:
        """None: no block's file has this name."""
        try:
            own, parent, *routing = file_name.removesuffix(SUFFIX).split("-")
            found = cls(bytes.fromhex(own), bytes.fromhex(parent), int(routing[0], 16) if routing else None)
        except ValueError:
            return None
        is_block = len(found.own) == len(found.parent) == _HASH_BYTES and found.file_name == file_name
        return found if is_block else None

    def header(self, layout: bytes, num_bytes: int, checksum: int) -> bytes:
        has_name, routing_hash = self.routing_hash is not None, self.routing_hash or 0
        fields = _FIELDS.pack(
            _MAGIC, VERSION, layout, self.own, self.parent, has_name, routing_hash, num_bytes, checksum
        ).ljust(HEADER_BYTES - _SUM.size, b"\0")
        return fields + _SUM.pack(crc32(fields))


def write_block(directory: Path, name: BlockName, layout: bytes, parts: Parts) -> None:
    content = _joined(parts)
    partial = directory / (name.file_name + PARTIAL)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(partial, flags, FILE_MODE)
        try:
            _write_all(file, name.header(layout, len(content), crc32(content)))
            _write_all(file, content)
        finally:
            os.close(file)
        os.rename(partial, directory / name.file_name)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def read_block(directory: Path, name: BlockName, layout: bytes, parts: Parts) -> None:
    """Fill `parts`. If it raises, their content means nothing."""
    num_bytes = sum(map(len, parts))
    file = os.open(directory / name.file_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(file), HEADER_BYTES + num_bytes)
        header, content = bytearray(HEADER_BYTES), _room(parts)
        _read_all(file, memoryview(header))
        _read_all(file, content)
    finally:
        os.close(file)
    if header != name.header(layout, num_bytes, crc32(content)):
        raise DamagedFile("its header or its checksum is not what it should be")
    if len(parts) > 1:
        _spread(content, parts)


def _check_owner(status: os.stat_result, num_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise DamagedFile("others can have written it")
    if status.st_size != num_bytes:
        raise DamagedFile(f"it has {status.st_size} bytes, not {num_bytes}")


def _joined(parts: Parts) -> memoryview:
    """One piece: to look at many would let go of the interpreter, and wait for it again, as many times."""
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _room(parts: Parts) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(bytearray(sum(map(len, parts))))


def _spread(content: memoryview, parts: Parts) -> None:
    at = 0
    for part in parts:
        part[:] = content[at : at + len(part)]
        at += len(part)


def _write_all(file: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _read_all(file: int, room: memoryview) -> None:
    while room:
        count = os.readv(file, [room])
        if not count:
            raise DamagedFile("it ends too early")
        room = room[count:]
