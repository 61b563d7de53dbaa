"""One engine's numbered stream of KV events, in order: what is missing is asked for again, what is lost is owned up to.

Told of messages, it says what they change and what it wants replayed. The sockets are `gateway.zmq_events`'s.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.errors import InvalidValue
from penstock.dialects.kv_blocks import Changes, EngineBlocks
from penstock.dialects.kv_events import Batch, decode

_MAX_HELD = 20_000  # messages that wait for a replay; engines keep 10,000


class _Message(NamedTuple):
    number: int
    batch: Batch | None  # None: it cannot be read


class KvStream:
    """`wants_replay` is set when something is missing; then comes `replayed`, maybe often, and `replay_over`."""

    def __init__(self, blocks: EngineBlocks, *, can_replay: bool = True) -> None:
        self.blocks = blocks
        blocks.is_approximate = True  # until it is known from the beginning
        self.num_lost = 0  # messages that nobody could give again
        self.wants_replay: int | None = 0 if can_replay else None  # from this number on: all there is, at first
        self._can_replay = can_replay
        self._last: int | None = None
        self._last_at = 0.0
        self._held: list[_Message] = []

    def live(self, number: int, payload: bytes, changes: Changes) -> None:
        message = _Message(number, _decoded(payload))
        if self.wants_replay is not None:
            self._hold(message)
            return
        self._take(message, changes)

    def replayed(self, number: int, payload: bytes, changes: Changes) -> None:
        if self._last is None or number > self._last:
            self._apply(_Message(number, _decoded(payload)), changes)

    def replay_over(self, changes: Changes, is_answered: bool = True) -> None:
        """There is no more, or nobody answers."""
        self.wants_replay = None
        held, self._held = self._held, []
        if is_answered and self._last is None and not held:
            self.blocks.is_approximate = False  # it has stored nothing yet
        for index, message in enumerate(held):
            if self.wants_replay is not None:  # it has begun anew in between
                self._held = held[index:]
                return
            self._take(message, changes, is_last_try=True)

    def _take(self, message: _Message, changes: Changes, is_last_try: bool = False) -> None:
        number, batch = message
        if self._last is not None and number <= self._last:
            if batch is None or batch.at <= self._last_at:
                return  # it was replayed already
            self._last = None  # the engine has started again, with an empty cache
            self.blocks.clear(changes)
        expected = 0 if self._last is None else self._last + 1
        if number > expected and self._can_replay and not is_last_try:
            self.wants_replay = expected
            self._hold(message)
            return
        self._apply(message, changes)

    def _apply(self, message: _Message, changes: Changes) -> None:
        number, batch = message
        expected = 0 if self._last is None else self._last + 1
        if number > expected or batch is None:
            self.num_lost += number - expected + (batch is None)
            self.blocks.is_approximate = True
        elif number == 0:
            self.blocks.is_approximate = False
        self._last = number
        if batch is not None:
            self._last_at = max(self._last_at, batch.at)
            self.blocks.apply(batch, changes)

    def _hold(self, message: _Message) -> None:
        if len(self._held) < _MAX_HELD:
            self._held.append(message)


def _decoded(payload: bytes) -> Batch | None:
    try:
        return decode(payload)
    except InvalidValue:
        return None
