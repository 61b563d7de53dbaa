"""A KV cache in host memory as bytes: a block is one piece in each part, as a layer's keys or its values are."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.transfer.messages import Layout
from penstock.transfer.ports import Staged

Ints = npt.NDArray[np.int64]


class Parts:
    """Memory of blocks. Pieces go part by part: blocks that follow each other are one stretch of a part."""

    def __init__(self, wholes: Sequence[memoryview], sizes: Sequence[int]) -> None:
        """`sizes`: of a block in each of them, in bytes."""
        self.wholes = wholes
        self.sizes: Ints = np.array(sizes, np.int64)
        self.addresses: Ints = np.array([address_of(each) for each in wholes], np.int64)
        self.num_blocks = min((len(whole) // size for whole, size in zip(wholes, sizes, strict=True)), default=0)

    @property
    def block_bytes(self) -> int:
        return int(self.sizes.sum())

    def views(self, block_ids: Sequence[int]) -> list[memoryview]:
        runs = list(_runs(block_ids))
        return [
            whole[first * size : (first + count) * size]
            for whole, size in zip(self.wholes, self.sizes.tolist(), strict=True)
            for first, count in runs
        ]


class ByteTools(Protocol):
    """How bytes of a host are copied and verified: by Python alone, or by C."""

    @property
    def checksum_name(self) -> str: ...

    def checksum(self, parts: Parts, block_ids: Sequence[int], identity: bytes) -> int:
        """A checksum of the blocks' bytes, part by part, wherever they lie, and of what they are said to be."""

    def copy(self, source: Parts, theirs: Sequence[int], target: Parts, ours: Sequence[int]) -> None: ...


class PlainTools:
    checksum_name = "crc32"

    def checksum(self, parts: Parts, block_ids: Sequence[int], identity: bytes) -> int:
        found = zlib.crc32(identity)
        for view in parts.views(block_ids):
            found = zlib.crc32(view, found)
        return found

    def copy(self, source: Parts, theirs: Sequence[int], target: Parts, ours: Sequence[int]) -> None:
        for its, own, size in zip(source.wholes, target.wholes, target.sizes.tolist(), strict=True):
            for there, here in zip(theirs, ours, strict=True):
                own[here * size : (here + 1) * size] = its[there * size : (there + 1) * size]


@dataclass
class _InPlace:
    """`Staged`: the blocks themselves."""

    parts: Parts
    block_ids: Sequence[int]
    tools: ByteTools

    @property
    def views(self) -> list[memoryview]:
        return self.parts.views(self.block_ids)

    def checksum(self, identity: bytes) -> int:
        return self.tools.checksum(self.parts, self.block_ids, identity)


class _Buffer(_InPlace):
    """`Staged`: room for so many blocks, as one piece. It stays in the processor's caches while it is filled and
    verified, and costs less to receive into than many small pieces do."""

    def __init__(self, sizes: Sequence[int], count: int, tools: ByteTools) -> None:
        whole = memoryview(bytearray(sum(sizes) * count))
        ends = [count * end for end in accumulate(sizes)]
        wholes = [whole[end - size * count : end] for end, size in zip(ends, sizes, strict=True)]
        super().__init__(Parts(wholes, sizes), range(count), tools)
        self._whole = whole

    @property
    def views(self) -> list[memoryview]:
        return [self._whole]


class HostMemory:
    """`BlockMemory` of a CPU's cache."""

    def __init__(self, parts: Parts, layout: Layout, tools: ByteTools | None = None) -> None:
        """`layout`: all but what the memory itself tells."""
        self.parts = parts
        self.tools: ByteTools = tools or PlainTools()
        self.layout = replace(
            layout,
            block_bytes=parts.block_bytes,
            num_parts=len(parts.sizes),
            checksum=self.tools.checksum_name,
        )

        self._own = threading.local()  # of each thread: its buffer

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[Staged]:
        yield _InPlace(self.parts, block_ids, self.tools)

    @contextmanager
    def writing(self, block_ids: Sequence[int]) -> Iterator[Staged]:
        buffer: _Buffer | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer.block_ids) != len(block_ids):  # messages have as many as they may, mostly
            buffer = self._own.buffer = _Buffer(self.parts.sizes.tolist(), len(block_ids), self.tools)
        yield buffer
        self.tools.copy(buffer.parts, buffer.block_ids, self.parts, block_ids)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Blocks that follow each other: the first, and how many."""
    first = count = 0
    for block_id in block_ids:
        if count and block_id == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block_id, 1
    if count:
        yield first, count
