"""KV blocks read from the memory of another engine of this machine: a cache that lies in a file without a name (memfd),
which others map, and copy from. When the last process that has it is gone, by whatever death, so is the memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.transfer.descriptors import DescriptorServer, fetch_offer
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

    def lend(self, parts: Parts) -> LentFile:
        """The file, for others, with the places of parts that were allocated here."""
        offsets = [self._pieces[address] for address in parts.addresses.tolist()]
        return LentFile(self._descriptor, self.nonce, offsets, self)


@dataclass(frozen=True)
class LentFile:
    """A file in memory that parts of a cache lie in."""

    descriptor: int  # to be read and written
    nonce: bytes
    offsets: Sequence[int]  # of the parts
    owner: object  # which closes the descriptor at its end

    def seal(self) -> int:
        """A descriptor that can only be read, for others. The file's size does not change any more: a process would be
        killed that reads what is not there."""
        if not fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:  # it may be offered again
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class _File(msgspec.Struct, frozen=True):
    nonce: bytes
    offsets: list[Count]  # of the parts of a block that lie in it


class _Handle(msgspec.Struct, frozen=True):
    socket: str  # where the descriptors are handed out
    files: list[_File]  # in their order: of each rank one
    num_blocks: Count


_handle_decoder = msgspec.msgpack.Decoder(_Handle)


class SharedMemoryMover:
    """`Mover` between engines of one machine and user, from one host memory to another."""

    name = "shm"
    is_local = True
    message_bytes = 64 << 20

    def __init__(self, memory: HostMemory, files: Sequence[LentFile], secret: str) -> None:
        """`files`: those that the memory's parts lie in, in the order of the parts."""
        self._memory, self._files, self._secret = memory, files, secret.encode()
        self._lock = threading.Lock()
        self._server: DescriptorServer | None = None

    def offer(self) -> bytes:
        with self._lock:
            if self._server is None:
                self._server = DescriptorServer(self._secret, [file.seal() for file in self._files])
            files = [_File(file.nonce, list(file.offsets)) for file in self._files]
            handle = _Handle(self._server.name, files, self._memory.parts.num_blocks)
        return msgspec.msgpack.encode(handle)

    def open(self, handle: bytes) -> RemoteMemory:
        said, descriptors = fetch_offer(handle, _handle_decoder, self._secret)
        try:
            return _MappedMemory(self._memory, said, descriptors)
        except OSError as error:
            raise Unreachable(str(error)) from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _MappedMemory:
    """`RemoteMemory`: the other engine's files, mapped here."""

    def __init__(self, memory: HostMemory, said: _Handle, descriptors: Sequence[int]) -> None:
        sizes = memory.parts.sizes.tolist()
        if [len(sizes), len(descriptors)] != [sum(len(file.offsets) for file in said.files), len(said.files)]:
            raise Unreachable("its memory has other parts")
        self._memory = memory
        self._mapped: list[mmap.mmap] = []
        wholes: list[memoryview] = []
        try:
            for file, descriptor in zip(said.files, descriptors, strict=True):
                own = sizes[len(wholes) : len(wholes) + len(file.offsets)]
                wholes += self._map(file, descriptor, [said.num_blocks * size for size in own])
        except BaseException:
            self._unmap(wholes)
            raise
        self._parts = Parts(wholes, sizes)

    def _map(self, file: _File, descriptor: int, lengths: Sequence[int]) -> list[memoryview]:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise Unreachable("its memory could be taken away while it is read")
        places = [(offset, offset + length) for offset, length in zip(file.offsets, lengths, strict=True)]
        if max((end for _, end in places), default=0) > os.fstat(descriptor).st_size:
            raise Unreachable("its memory is smaller than it says")
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._mapped.append(mapped)
        if mapped[:_NONCE_BYTES] != file.nonce:
            raise Unreachable("its memory is another process's")
        with memoryview(mapped) as whole:
            return [whole[offset:end] for offset, end in places]

    def copy(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        if max(theirs) >= self._parts.num_blocks:
            raise Unreachable("its memory has no such block")
        self._memory.tools.copy(self._parts, theirs, self._memory.parts, ours)

    def close(self) -> None:
        self._unmap(self._parts.wholes)

    def _unmap(self, wholes: Sequence[memoryview]) -> None:
        for whole in wholes:
            whole.release()
        for mapped in self._mapped:
            mapped.close()


def machine_identity() -> str:
    """The same for processes that can share memory: this boot of this machine, and the user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.getuid()}"
