"""Device memory of another process of this machine, mapped here at addresses that stay while the other gives its memory
back and takes new. It knows descriptors and bytes; that they are KV blocks is not its affair."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Protocol

from torch import Tensor


class MappingDriver(Protocol):
    """The driver's calls that mapping another process's memory takes: see `cuda_driver`."""

    def reserve(self, num_bytes: int) -> int: ...

    def free(self, address: int, num_bytes: int) -> None: ...

    def import_memory(self, descriptor: int) -> int: ...

    def map(self, address: int, num_bytes: int, handle: int, *, is_writable: bool = True) -> None: ...

    def unmap(self, address: int, num_bytes: int) -> None: ...

    def release(self, handle: int) -> None: ...

    def tensor(self, address: int, num_bytes: int) -> Tensor: ...


class MappedMemory:
    """Addresses for so much of another process's memory, with that behind them while it is mapped. The memory outlives
    the other process for as long as that lasts."""

    def __init__(self, driver: MappingDriver, num_bytes: int, *, is_writable: bool) -> None:
        self._driver, self._num_bytes, self._is_writable = driver, num_bytes, is_writable
        self._imported: int | None = None  # None: nothing is mapped
        self._address = driver.reserve(num_bytes)
        self.bytes = driver.tensor(self._address, num_bytes)  # not to be used while nothing is mapped

    def map(self, descriptor: int) -> None:
        """The descriptor is not kept. Raises RuntimeError, as where the memory is smaller, or another device's that
        this one cannot reach; nothing is mapped then."""
        assert self._imported is None
        driver = self._driver
        imported = driver.import_memory(descriptor)
        try:
            driver.map(self._address, self._num_bytes, imported, is_writable=self._is_writable)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # it was mapped, and only the access to it was refused
                driver.unmap(self._address, self._num_bytes)
            driver.release(imported)
            raise
        self._imported = imported

    def unmap(self) -> None:
        if self._imported is not None:
            self._driver.unmap(self._address, self._num_bytes)
            self._driver.release(self._imported)
            self._imported = None

    def close(self) -> None:
        """Its addresses are given up too."""
        self.unmap()
        del self.bytes
        self._driver.free(self._address, self._num_bytes)


class RankPool:
    """The KV cache of another rank on a GPU of this machine, to be read and written, and to be lent to other engines.
    Belongs to the thread that runs steps, but for `export`, which any thread may call."""

    def __init__(self, driver: MappingDriver, num_bytes: int, shape: tuple[int, int, int]) -> None:
        """`shape`: parts, blocks, and bytes of a block's part."""
        parts, num_blocks, part_bytes = shape
        self.num_bytes = num_bytes
        self._memory = MappedMemory(driver, num_bytes, is_writable=True)
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self.parts = self._memory.bytes[: parts * num_blocks * part_bytes].view(parts, num_blocks, part_bytes)

    def map(self, descriptor: int) -> None:
        """The descriptor is kept, and is this object's from here on. Raises RuntimeError."""
        try:
            self._memory.map(descriptor)
        except RuntimeError:
            os.close(descriptor)
            raise
        with self._lock:
            self._descriptor = descriptor

    def unmap(self) -> None:
        """Nothing of the memory is held here any more, so that its rank can give it back."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        self._memory.unmap()

    def export(self) -> int:
        """A descriptor for others; whoever asks closes it. Raises RuntimeError while nothing is mapped."""
        with self._lock:
            if self._descriptor is None:
                raise RuntimeError("it is parked")
            return os.dup(self._descriptor)
