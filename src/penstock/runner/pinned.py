"""Host memory that a GPU copies from and to by itself: mapped, touched by all cores at once, then pinned.

The driver's own allocator touches small pages one after the other, which takes six times as long.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from penstock.core.errors import ConfigError

_GIB = 1 << 30


class PinnedMemory:
    """Pinned for as long as this lives; what is made of `bytes` must not live longer."""

    def __init__(self, num_bytes: int, *, wanted_by: str = "host_kv_gib", param: str | None = "host_kv_gib") -> None:
        wanted = f"{wanted_by} asks for {num_bytes / _GIB:.1f} GiB of host memory"
        try:
            region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{wanted}, which cannot be had: {error}", param=param) from None
        with suppress(OSError):  # a wish: fewer pages are faster to touch and to pin
            region.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(region, dtype=torch.uint8)
        self.bytes.zero_()
        status = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))  # type: ignore[no-untyped-call]
        if status:
            raise ConfigError(f"{wanted}, which the GPU's driver cannot pin (error {status})", param=param)
        weakref.finalize(self, _unpin, self.bytes).atexit = False  # the end of the process does it too


def _unpin(memory: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
