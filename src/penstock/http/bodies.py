"""The memory that all bodies on their way in may take together, and how clients share it. Knows no socket.

A body takes its room before it is read, all of it where its length is declared. One that finds no room is refused at
once and not kept waiting: a body that waits holds a connection and what was read of it, and its client could have gone
to another gateway meanwhile, as clients do by themselves after a 503 with Retry-After.
"""

from __future__ import annotations


class BodyBudget:
    """Nobody may take more than is free afterwards: one owner gets at most half, and however many there are, the next
    one finds half of what they left."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        self._held_bytes: dict[str, int] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._held_bytes.values())

    def reserve(self, owner: str, num_bytes: int) -> bool:
        held_bytes = self._held_bytes.get(owner, 0) + num_bytes
        if held_bytes > self._free_bytes - num_bytes:
            return False
        self._free_bytes -= num_bytes
        self._held_bytes[owner] = held_bytes
        return True

    def release(self, owner: str, num_bytes: int) -> None:
        self._free_bytes += num_bytes
        self._held_bytes[owner] -= num_bytes
        if not self._held_bytes[owner]:
            del self._held_bytes[owner]
