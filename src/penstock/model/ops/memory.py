"""Memory for weights and the cache, in huge pages where the system has them.

A processor fetches ahead only within a page, and its tables hold a few thousand pages: one stream of weights is read
half as fast again from huge ones, and attention over scattered blocks is an eighth faster.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 16 << 20
MAX_SETTLED = 1 << 30
_PAGE = 4096
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_POPULATE_WRITE = 23  # of Linux 5.14 and later; Python has no name for it


def pages(num_bytes: int, *, huge: bool = False) -> Tensor:
    """Zeroed bytes that cost memory only once they are touched. Not huge for what is touched while requests wait: the
    system may first have to move others' pages to make room for a whole one. `settle` may make them so later."""
    slack = HUGE_PAGE if huge or num_bytes >= HUGE_PAGE else 0
    mapped = mmap.mmap(-1, max(num_bytes, 1) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping alive, and so does every part of it
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -whole.data_ptr() % HUGE_PAGE if slack else 0
    return whole[start : start + num_bytes]


def settle(parts: Sequence[Tensor]) -> bool:
    """Take the memory of untouched pages now, in huge ones, before it is waited for. False if some is left to be taken
    as it is touched: because it is much, or the system takes none ahead, or has no huge pages."""
    if not _has_huge_pages() or sum(part.nbytes for part in parts) > MAX_SETTLED:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    refused = 0
    for part in parts:  # refused is also what does not begin with a page
        madvise(part.data_ptr(), part.nbytes, mmap.MADV_HUGEPAGE)
        refused += madvise(part.data_ptr(), part.nbytes, _POPULATE_WRITE) != 0
    return not refused


def release(parts: Sequence[Tensor]) -> None:
    """Give the memory of these back to the system: they read as zeros, and take it again as they are touched. The pages
    at either end stay, where others may begin."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for part in parts:
        begin, end = -(-part.data_ptr() // _PAGE) * _PAGE, (part.data_ptr() + part.nbytes) // _PAGE * _PAGE
        advice = (mmap.MADV_REMOVE, mmap.MADV_DONTNEED)  # the first where others may have mapped it too
        if end > begin and all(madvise(begin, end - begin, each) for each in advice):
            part.zero_()  # a system that does not know it


def _has_huge_pages() -> bool:
    """Whether a process gets them by asking for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


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
