"""Results that are kept because they are likely to be asked for again: by digest, the latest used, within bounds.

A result belongs to a namespace of the prefix cache (`core.hashing.cache_namespace`) and is found by nobody else: the
time that an answer takes would tell what others have sent.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """For several threads."""

    def __init__(self, most: int, most_bytes: int = 0) -> None:
        """`most_bytes`: of results whose sizes are told; 0: they are all small."""
        self._most = most
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, bytes], tuple[T, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, namespace: str, name: bytes) -> T | None:
        key = (namespace, name)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, namespace: str, name: bytes, result: T, num_bytes: int = 0) -> None:
        key = (namespace, name)
        with self._lock:
            self._num_bytes += num_bytes - self._kept.pop(key, (result, 0))[1]
            self._kept[key] = result, num_bytes
            while len(self._kept) > self._most or self._num_bytes > self._most_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1][1]
