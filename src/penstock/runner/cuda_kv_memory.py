"""The KV cache of a GPU, for code that sends blocks to another engine or takes them: as bytes by way of pinned host
memory, and as memory that engines of the same machine map and copy from (CUDA IPC, by file descriptors).

The first of several ranks has the caches of all mapped, and a block has parts in each of them.

A copy belongs to the thread that asks for it, has a stream of its own, and is done when it returns. The caller that
lends or takes blocks sees to it that no step reads or writes them meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from penstock.model.ops import LayerKV
from penstock.model.ops.triton import TritonKV
from penstock.model.ops.triton.attention.kv_copy import as_words, copy_between, gather_blocks, scatter_blocks
from penstock.runner.cuda_driver import CudaDriver
from penstock.runner.kv_memory import byte_tools
from penstock.runner.mapped_memory import MappedMemory, RankPool
from penstock.runner.virtual_memory import VirtualMemory
from penstock.transfer.descriptors import DescriptorServer, fetch_offer
from penstock.transfer.host_memory import ByteTools, Parts
from penstock.transfer.messages import Count, Layout
from penstock.transfer.ports import RemoteMemory, Staged, Unreachable


def device_memory(kv: Sequence[LayerKV], layout: Layout, others: Sequence[RankPool] = ()) -> DeviceMemory:
    """`layout`: all but what the caches tell; `others`: those of the ranks after this one."""
    first = kv[0]
    assert isinstance(first, TritonKV)
    return DeviceMemory(first.pool, layout, others)


@dataclass(frozen=True)
class _Staging:
    """`Staged`: some blocks in pinned host memory, rank by rank, one after the other, and the same on the device."""

    stream: torch.cuda.Stream
    host: Tensor  # words of all
    device: Tensor  # likewise
    by_rank: list[Tensor]  # views of `device`: [blocks, parts, words]
    parts: Parts  # the host's: one piece a block, of each rank
    tools: ByteTools
    count: int

    @property
    def views(self) -> list[memoryview]:
        return list(self.parts.wholes)

    def checksum(self, identity: bytes) -> int:
        return self.tools.checksum(self.parts, range(self.count), identity)


class DeviceMemory:
    """`BlockMemory` of a GPU's cache, and of those of other ranks that are mapped here."""

    def __init__(self, pool: Tensor, layout: Layout, others: Sequence[RankPool] = ()) -> None:
        """`pool`: this rank's; `others`: those of the ranks after it."""
        self.pool, self.others = pool, others
        self.words = [as_words(pool), *(other.parts.view(torch.int32) for other in others)]  # [parts, blocks, words]
        self._tools = byte_tools()
        self._own = threading.local()  # of each thread: its staging
        self.layout = msgspec.structs.replace(
            layout,
            block_bytes=4 * sum(self.block_words),
            num_parts=sum(words.shape[0] for words in self.words),
            checksum=self._tools.checksum_name,
        )

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def block_words(self) -> list[int]:
        """Words of a block in the cache of each rank."""
        return [words.shape[0] * words.shape[2] for words in self.words]

    @property
    def num_blocks(self) -> int:
        return self.words[0].shape[1]

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[Staged]:
        staging = self._staging(len(block_ids))
        with torch.cuda.stream(staging.stream):
            ids = ids_on(self.device, block_ids)
            for words, staged in zip(self.words, staging.by_rank, strict=True):
                gather_blocks(words, ids, staged)
            staging.host.copy_(staging.device, non_blocking=True)
        staging.stream.synchronize()
        yield staging

    @contextmanager
    def writing(self, block_ids: Sequence[int]) -> Iterator[Staged]:
        staging = self._staging(len(block_ids))
        yield staging
        with torch.cuda.stream(staging.stream):
            staging.device.copy_(staging.host, non_blocking=True)
            ids = ids_on(self.device, block_ids)
            for words, staged in zip(self.words, staging.by_rank, strict=True):
                scatter_blocks(staged, ids, words)
        staging.stream.synchronize()

    def _staging(self, count: int) -> _Staging:
        """This thread's: messages have as many blocks as they may, mostly."""
        found: _Staging | None = getattr(self._own, "staging", None)
        if found is None or found.count != count:
            torch.cuda.set_device(self.device)
            sizes = [count * size for size in self.block_words]
            host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
            stream = found.stream if found is not None else make_stream(self.device)
            with torch.cuda.stream(stream):  # or it could be memory that steps on their way still use, although freed
                device = torch.empty_like(host, device=self.device)
            shapes = [(count, words.shape[0], words.shape[2]) for words in self.words]
            by_rank = [part.view(shape) for part, shape in zip(torch.split(device, sizes), shapes, strict=True)]
            wholes = [memoryview(part.view(torch.uint8).numpy().data) for part in torch.split(host, sizes)]
            parts = Parts(wholes, [4 * size for size in self.block_words])
            found = self._own.staging = _Staging(stream, host, device, by_rank, parts, self._tools, count)
        return found


class _Handle(msgspec.Struct, frozen=True):
    socket: str  # where the descriptors are handed out
    num_bytes: list[Count]  # of the physical memory of each rank, in their order, which is the descriptors' too
    num_blocks: Count


_handle_decoder = msgspec.msgpack.Decoder(_Handle)


class CudaMover:
    """`Mover` between engines on GPUs of one machine and user."""

    name = "cuda"
    is_local = True
    message_bytes = 1 << 30

    def __init__(self, memory: DeviceMemory, virtual: VirtualMemory, driver: CudaDriver, secret: str) -> None:
        """`virtual`: that this rank's cache lies in."""
        self._memory, self._virtual, self._driver, self._secret = memory, virtual, driver, secret.encode()
        self._lock = threading.Lock()
        self._server: DescriptorServer | None = None

    def offer(self) -> bytes:
        memory = self._memory
        with self._lock:
            if self._server is None:
                self._server = DescriptorServer(self._secret, self._export())
            name = self._server.name
        sizes = [self._virtual.size_of(memory.pool), *(other.num_bytes for other in memory.others)]
        return msgspec.msgpack.encode(_Handle(name, sizes, memory.num_blocks))

    def _export(self) -> list[int]:
        """Descriptors of the caches of all ranks. Raises Unreachable."""
        found: list[int] = []
        try:
            found.append(self._virtual.export(self._memory.pool))
            found.extend(other.export() for other in self._memory.others)
        except RuntimeError as error:  # it is parked at this moment
            _close_all(found)
            raise Unreachable(str(error)) from None
        return found

    def open(self, handle: bytes) -> RemoteMemory:
        said, descriptors = fetch_offer(handle, _handle_decoder, self._secret)
        try:
            return _MappedPools(self._memory, self._driver, said, descriptors)
        finally:
            _close_all(descriptors)

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _MappedPools:
    """`RemoteMemory`: the caches of all ranks of the other engine, mapped here to be read. They outlive that engine
    while they are mapped. Belongs to the thread that copies."""

    def __init__(self, memory: DeviceMemory, driver: CudaDriver, said: _Handle, descriptors: Sequence[int]) -> None:
        if not len(memory.words) == len(said.num_bytes) == len(descriptors):
            raise Unreachable("its memory has other parts")
        needed = [4 * size * said.num_blocks for size in memory.block_words]
        if any(not 0 < least <= size for least, size in zip(needed, said.num_bytes, strict=True)):
            raise Unreachable("its memory is smaller than it says")
        torch.cuda.set_device(memory.device)
        self._memory, self._num_blocks = memory, said.num_blocks
        self._mapped: list[MappedMemory] = []
        try:
            for size, descriptor in zip(said.num_bytes, descriptors, strict=True):
                self._mapped.append(MappedMemory(driver, size, is_writable=False))
                self._mapped[-1].map(descriptor)
        except RuntimeError as error:  # another GPU that this one cannot reach, or less memory than was said
            self.close()
            raise Unreachable(str(error)) from None
        self._words = [
            mapped.bytes[:size].view(torch.int32).view(own.shape[0], said.num_blocks, own.shape[2])
            for mapped, size, own in zip(self._mapped, needed, memory.words, strict=True)
        ]
        self._stream = make_stream(memory.device)

    def copy(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        if max(theirs) >= self._num_blocks:
            raise Unreachable("its memory has no such block")
        device = self._memory.device
        with torch.cuda.stream(self._stream):
            there, here = ids_on(device, theirs), ids_on(device, ours)
            for words, own in zip(self._words, self._memory.words, strict=True):
                copy_between(words, there, own, here)
        self._stream.synchronize()

    def close(self) -> None:
        self._words = []
        for mapped in self._mapped:
            mapped.close()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def ids_on(device: torch.device, block_ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(block_ids), dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
