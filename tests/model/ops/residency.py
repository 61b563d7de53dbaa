"""The pages of a tensor that are in memory, as the kernel tells it of its very addresses: what the rest of the process
takes or gives back meanwhile does not count."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor


def resident_bytes(tensor: Tensor) -> int:
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore(start, length, pages):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
