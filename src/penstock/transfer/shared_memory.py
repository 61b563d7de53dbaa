"""KV blocks read from the memory of another engine of this machine: a cache that lies in a file without a name (memfd),
which others map, and copy from. When the last process that has it is gone, by whatever death, so is the memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import msgspec

from penstock.link.connection import Disconnected
from penstock.link.proof import Refused
from penstock.transfer.descriptors import DescriptorServer, fetch_descriptors
from penstock.transfer.host_memory import HostMemory, Parts, address_of
from penstock.transfer.messages import Count
from penstock.transfer.ports import RemoteMemory, Unreachable

_ALIGNMENT = 2 << 20  # of a piece in the file: a huge page, where files have them
_NONCE_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFile:
    """Memory that other processes can map, to read it. Pages that are never touched take none."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("penstock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._descriptor)  # what is mapped stays
        self._pieces: dict[int, int] = {}  # where each begins in the file, by where it begins in this process
        self._size = 0
        self.nonce = os.urandom(_NONCE_BYTES)  # at its beginning: who maps it knows by it that it is this one
        self.allocate(_NONCE_BYTES)[:] = self.nonce

    def allocate(self, num_bytes: int) -> memoryview:
        """Zeroed. It stays as long as somebody has it."""
        offset, whole = self._size, max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        os.ftruncate(self._descriptor, offset + whole)
        self._size = offset + whole
        mapped = mmap.mmap(self._descriptor, whole, offset=offset)
        piece = memoryview(mapped)[:num_bytes]
        self._pieces[address_of(piece)] = offset
        return piece

    def offsets(self, parts: Parts) -> list[int]:
        """Where memory that came from here begins in the file."""
        return [self._pieces[address] for address in parts.addresses.tolist()]

    def seal(self) -> int:
        """A descriptor that can only be read, for others. The file's size does not change any more: a process would be
        killed that reads what is not there."""
        if not fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:  # it may be offered again
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class _Handle(msgspec.Struct, frozen=True):
    socket: str  # where the descriptor is handed out
    nonce: bytes
    offsets: list[Count]  # of the parts of a block
    num_blocks: Count


class SharedMemoryMover:
    """`Mover` between engines of one machine and user, from one host memory to another."""

    name = "shm"
    is_local = True
    message_bytes = 64 << 20

    def __init__(self, memory: HostMemory, file: MemoryFile, secret: str) -> None:
        """`file`: that the memory's parts lie in."""
        self._memory, self._file, self._secret = memory, file, secret.encode()
        self._lock = threading.Lock()
        self._server: DescriptorServer | None = None

    def offer(self) -> bytes:
        with self._lock:
            if self._server is None:
                self._server = DescriptorServer(self._secret, [self._file.seal()])
            parts = self._memory.parts
            handle = _Handle(self._server.name, self._file.nonce, self._file.offsets(parts), parts.num_blocks)
        return msgspec.msgpack.encode(handle)

    def open(self, handle: bytes) -> RemoteMemory:
        try:
            said = msgspec.msgpack.decode(handle, type=_Handle)
            (descriptor,) = fetch_descriptors(said.socket, self._secret)
        except (msgspec.MsgspecError, OSError, ValueError, Refused, Disconnected) as error:
            raise Unreachable(str(error) or "its memory was not handed over") from None
        try:
            return _MappedMemory(self._memory, said, descriptor)
        except OSError as error:
            raise Unreachable(str(error)) from None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _MappedMemory:
    """`RemoteMemory`: the other engine's file, mapped here."""

    def __init__(self, memory: HostMemory, said: _Handle, descriptor: int) -> None:
        own = memory.parts
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise Unreachable("its memory could be taken away while it is read")
        lengths = [said.num_blocks * size for size in own.sizes.tolist()]
        if len(said.offsets) != len(lengths):
            raise Unreachable("its memory has other parts")
        ends = [offset + length for offset, length in zip(said.offsets, lengths, strict=True)]
        if max(ends) > os.fstat(descriptor).st_size:
            raise Unreachable("its memory is smaller than it says")
        self._memory = memory
        self._mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        if self._mapped[:_NONCE_BYTES] != said.nonce:
            self._mapped.close()
            raise Unreachable("its memory is another process's")
        with memoryview(self._mapped) as whole:
            wholes = [whole[offset:end] for offset, end in zip(said.offsets, ends, strict=True)]
        self._parts = Parts(wholes, own.sizes.tolist())

    def copy(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        if max(theirs) >= self._parts.num_blocks:
            raise Unreachable("its memory has no such block")
        self._memory.tools.copy(self._parts, theirs, self._memory.parts, ours)

    def close(self) -> None:
        for whole in self._parts.wholes:
            whole.release()
        self._mapped.close()


def machine_identity() -> str:
    """The same for processes that can share memory: this boot of this machine, and the user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.getuid()}"
