"""Memory that large requests took, given back to the operating system."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def trimming(work: Callable[[], T]) -> T:
    """Does the work. Its memory is free afterwards and no longer the process's, whether or not it went well: threads
    have heaps of their own, which glibc keeps for their next work."""
    try:
        return work()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # which hold what had been built
        raise
    finally:
        if _malloc_trim is not None:
            _malloc_trim(0)
