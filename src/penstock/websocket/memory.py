"""Conversations that only their socket remembers: OpenAI's clients go on from a response with `store: false` as long as
the socket is open, and send no more than what is new.

The last responses of a socket are kept, within room for each socket and for all of a process; of one that has gone the
application says whether it knows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.api.responses.objects import Object, encode
from penstock.api.responses.stored import Turn

MAX_PROCESS_BYTES = 128 << 20
MAX_SOCKET_BYTES = 2 << 20


class Room:
    """Bytes of all conversations of a process."""

    def __init__(self, max_bytes: int = MAX_PROCESS_BYTES) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Conversations:
    """Turns up to each response of a socket that is remembered; turns are shared, and count for each."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._turns: dict[str, list[Turn]] = {}  # by the last response, the oldest first
        self._held_bytes = 0

    def up_to(self, response_id: str | None) -> list[Turn] | None:
        """None: this response is not remembered."""
        return self._turns.get(response_id) if response_id is not None else None

    def remember(self, response_id: str, before: Sequence[Turn], items: Sequence[Object], output: object) -> None:
        turns = [*before, Turn(encode(items).decode(), encode({"output": output}).decode())]
        num_bytes = _size(turns)
        while self._turns and self._held_bytes + num_bytes > MAX_SOCKET_BYTES:
            self._forget(next(iter(self._turns)))
        free_bytes = min(MAX_SOCKET_BYTES - self._held_bytes, self._room.max_bytes - self._room.held_bytes)
        if num_bytes <= free_bytes:
            self._turns[response_id] = turns
            self._take(num_bytes)

    def forget_all(self) -> None:
        self._turns.clear()
        self._take(-self._held_bytes)

    def _forget(self, response_id: str) -> None:
        self._take(-_size(self._turns.pop(response_id)))

    def _take(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self._room.held_bytes += num_bytes


def _size(turns: Sequence[Turn]) -> int:
    return sum(len(turn.input) + len(turn.response) for turn in turns)
