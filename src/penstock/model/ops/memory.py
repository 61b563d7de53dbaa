"""Memory for weights and the cache; for weights in huge pages, where the system has them.

A processor fetches ahead only within a page, and its tables hold a few thousand pages: one stream of weights is read
half as fast again from huge ones.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 16 << 20
_PAGE = 4096


def pages(num_bytes: int, *, huge: bool = False) -> Tensor:
    """Zeroed bytes that cost memory only once they are touched. Not huge for what is touched while requests wait: the
    system may first have to move others' pages to make room for a whole one."""
    mapped = mmap.mmap(-1, max(num_bytes, 1) + huge * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping alive, and so does every part of it
    if not huge or not hasattr(mmap, "MADV_HUGEPAGE"):
        return whole[:num_bytes]
    with suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes]


class Arena:
    """Hands out parts of larger pieces, which are given back when nobody holds any of their parts."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def pages(self, num_bytes: int) -> Tensor:
        """Huge ones: a small weight has none of its own."""
        if num_bytes > CHUNK // 2:
            return pages(num_bytes, huge=True)
        if num_bytes > len(self._left):
            self._left = pages(CHUNK, huge=True)
        part, self._left = self._left[:num_bytes], self._left[-(-num_bytes // _PAGE) * _PAGE :]
        return part
