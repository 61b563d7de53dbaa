"""The KV cache of a GPU, for whoever sends blocks to another engine or takes them: as bytes by way of pinned host
memory, and as memory that engines of the same machine map and copy from (CUDA IPC, by file descriptors).

A copy belongs to the thread that asks for it, has a stream of its own, and is done when it returns. Whoever lends or
takes blocks sees to it that no step reads or writes them meanwhile.
"""

from __future__ import annotations

import contextlib
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
from penstock.runner.virtual_memory import VirtualMemory
from penstock.transfer.descriptors import DescriptorServer, fetch_offer
from penstock.transfer.host_memory import ByteTools, Parts
from penstock.transfer.messages import Count, Layout
from penstock.transfer.ports import RemoteMemory, Staged, Unreachable


def device_memory(kv: Sequence[LayerKV], layout: Layout) -> DeviceMemory:
    """`layout`: all but what the cache tells."""
    first = kv[0]
    assert isinstance(first, TritonKV)
    return DeviceMemory(first.pool, layout)


@dataclass(frozen=True)
class _Staging:
    """`Staged`: some blocks in pinned host memory, one after the other, and the same on the device."""

    stream: torch.cuda.Stream
    host: Tensor  # [blocks, parts, words]
    device: Tensor  # likewise
    parts: Parts  # the host's: one piece a block
    tools: ByteTools

    @property
    def views(self) -> list[memoryview]:
        return list(self.parts.wholes)

    def checksum(self, identity: bytes) -> int:
        return self.tools.checksum(self.parts, range(self.parts.num_blocks), identity)


class DeviceMemory:
    """`BlockMemory` of a GPU's cache."""

    def __init__(self, pool: Tensor, layout: Layout) -> None:
        self.pool = pool
        self.words = as_words(pool)  # [parts, blocks, words]
        self._tools = byte_tools()
        self._own = threading.local()  # of each thread: its staging
        parts, _, words = self.words.shape
        self.layout = msgspec.structs.replace(
            layout, block_bytes=4 * parts * words, num_parts=parts, checksum=self._tools.checksum_name
        )

    @property
    def device(self) -> torch.device:
        return self.words.device

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[Staged]:
        staging = self._staging(len(block_ids))
        with torch.cuda.stream(staging.stream):
            gather_blocks(self.words, ids_on(self.device, block_ids), staging.device)
            staging.host.copy_(staging.device, non_blocking=True)
        staging.stream.synchronize()
        yield staging

    @contextmanager
    def writing(self, block_ids: Sequence[int]) -> Iterator[Staged]:
        staging = self._staging(len(block_ids))
        yield staging
        with torch.cuda.stream(staging.stream):
            staging.device.copy_(staging.host, non_blocking=True)
            scatter_blocks(staging.device, ids_on(self.device, block_ids), self.words)
        staging.stream.synchronize()

    def _staging(self, count: int) -> _Staging:
        """This thread's: messages have as many blocks as they may, mostly."""
        found: _Staging | None = getattr(self._own, "staging", None)
        if found is None or found.host.shape[0] != count:
            torch.cuda.set_device(self.device)
            parts, _, words = self.words.shape
            host = torch.empty(count, parts, words, dtype=torch.int32, pin_memory=True)
            whole = memoryview(host.view(-1).view(torch.uint8).numpy().data)
            stream = found.stream if found is not None else make_stream(self.device)
            device = torch.empty_like(host, device=self.device)
            found = _Staging(stream, host, device, Parts([whole], [len(whole) // count]), self._tools)
            self._own.staging = found
        return found


class _Handle(msgspec.Struct, frozen=True):
    socket: str  # where the descriptor is handed out
    num_bytes: Count  # of the physical memory
    num_blocks: Count


class CudaMover:
    """`Mover` between engines on GPUs of one machine and user."""

    name = "cuda"
    is_local = True
    message_bytes = 1 << 30

    def __init__(self, memory: DeviceMemory, virtual: VirtualMemory, driver: CudaDriver, secret: str) -> None:
        """`virtual`: that the cache lies in."""
        self._memory, self._virtual, self._driver, self._secret = memory, virtual, driver, secret.encode()
        self._lock = threading.Lock()
        self._server: DescriptorServer | None = None

    def offer(self) -> bytes:
        pool = self._memory.pool
        with self._lock:
            if self._server is None:
                try:
                    self._server = DescriptorServer(self._secret, [self._virtual.export(pool)])
                except RuntimeError as error:  # it is parked at this moment
                    raise Unreachable(str(error)) from None
            name = self._server.name
        num_blocks = self._memory.words.shape[1]
        return msgspec.msgpack.encode(_Handle(name, self._virtual.size_of(pool), num_blocks))

    def open(self, handle: bytes) -> RemoteMemory:
        said, (descriptor, *_) = fetch_offer(handle, _Handle, self._secret)
        try:
            return _MappedPool(self._memory, self._driver, said, descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _MappedPool:
    """`RemoteMemory`: the other engine's cache, mapped here to be read. It outlives that engine, for as long as it is
    mapped. Belongs to the thread that copies."""

    def __init__(self, memory: DeviceMemory, driver: CudaDriver, said: _Handle, descriptor: int) -> None:
        parts, _, words = memory.words.shape
        needed = 4 * parts * words * said.num_blocks
        if not 0 < needed <= said.num_bytes:
            raise Unreachable("its memory is smaller than it says")
        torch.cuda.set_device(memory.device)
        self._memory, self._driver, self._num_bytes = memory, driver, said.num_bytes
        with contextlib.ExitStack() as undo:
            try:
                self._imported = driver.import_memory(descriptor)
                undo.callback(driver.release, self._imported)
                self._address = driver.reserve(said.num_bytes)
                undo.callback(driver.free, self._address, said.num_bytes)
                driver.map(self._address, said.num_bytes, self._imported, is_writable=False)
            except RuntimeError as error:  # another GPU that this one cannot reach, or less memory than was said
                raise Unreachable(str(error)) from None
            undo.pop_all()
        whole = driver.tensor(self._address, said.num_bytes)[:needed]
        self._words = whole.view(torch.int32).view(parts, said.num_blocks, words)
        self._stream = make_stream(memory.device)

    def copy(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        if max(theirs) >= self._words.shape[1]:
            raise Unreachable("its memory has no such block")
        device = self._memory.device
        with torch.cuda.stream(self._stream):
            copy_between(self._words, ids_on(device, theirs), self._memory.words, ids_on(device, ours))
        self._stream.synchronize()

    def close(self) -> None:
        del self._words
        self._driver.unmap(self._address, self._num_bytes)
        self._driver.release(self._imported)
        self._driver.free(self._address, self._num_bytes)


def ids_on(device: torch.device, block_ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(block_ids), dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
