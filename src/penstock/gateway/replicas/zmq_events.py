"""Reads other engines' KV events from their ZMQ sockets, in a thread of its own, and tells the event loop what changed.

One thread for all replicas: it receives, decodes and hashes, so the loop only applies ready numbers. What is missing is
asked for at the replay socket. Needs pyzmq (the extra `zmq`); without it the index knows nothing of such replicas.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.tiers import Tier
from penstock.dialects.kv_blocks import Changes, EngineBlocks
from penstock.dialects.kv_stream import KvStream
from penstock.gateway.replicas.kv_follower import BlockIndex
from penstock.observe.background import Worker, outliving

_NAME = "kv events"
_POLL_MS = 100
_REPLAY_S = 2.0  # without an answer for so long it is over
_MAX_AT_ONCE = 16  # messages of one replica before the others, and the event loop, have their turn
_HWM = 100_000
_END = -1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EventSource:
    """Where a replica publishes: `tcp://host:port`, one for each data-parallel rank."""

    replica_id: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


Told = Callable[[EventSource, Changes, bool], None]  # True: the index of this replica is approximate


class IndexTeller:
    """Tells an index of routing blocks what the readers found. A replica's ranks are one replica to it."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._known: dict[str, dict[EventSource, dict[int, Tier]]] = {}
        self._approximate: set[EventSource] = set()

    def told(self, source: EventSource, changes: Changes, is_approximate: bool) -> None:
        replica_id, index = source.replica_id, self._index
        ranks = self._known.setdefault(replica_id, {})
        is_new = source not in ranks
        known = ranks.setdefault(source, {})
        removed = list(known if changes.is_cleared else changes.removed)
        for name in removed:
            known.pop(name, None)
        known |= dict.fromkeys(changes.stored, Tier.DEVICE) | dict.fromkeys(changes.on_host, Tier.HOST)
        was_approximate = not self._approximate.isdisjoint(ranks)
        self._approximate.add(source) if is_approximate else self._approximate.discard(source)
        if self._approximate.isdisjoint(ranks) and (is_new or was_approximate):
            places = _places(set().union(*ranks.values()), ranks.values())
            index.reset(replica_id, places[Tier.DEVICE])
            if places[Tier.HOST]:
                index.stored_on_host(replica_id, places[Tier.HOST])
            return
        places = _places({*removed, *changes.stored, *changes.on_host}, ranks.values())
        for tell, names in (
            (index.removed, places[None]),
            (index.stored, places[Tier.DEVICE]),
            (index.stored_on_host, places[Tier.HOST]),
        ):
            if names:
                tell(replica_id, names)
        if is_approximate:
            index.lost_track(replica_id)

    def forget(self, replica_id: str) -> None:
        self._approximate.difference_update(self._known.pop(replica_id, {}))
        self._index.forget(replica_id)


def _places(names: Iterable[int], ranks: Collection[dict[int, Tier]]) -> dict[Tier | None, list[int]]:
    """Where each is: on the device, if it is on one rank's."""
    places: dict[Tier | None, list[int]] = {Tier.DEVICE: [], Tier.HOST: [], None: []}
    for name in names:
        tiers = {known.get(name) for known in ranks}
        places[next((tier for tier in Tier if tier in tiers), None)].append(name)
    return places


class KvEventReader:
    """`told` is called in the event loop, with everything that changed since it was last called."""

    def __init__(self, told: Told, *, namespace_of: Callable[[str], str] = str) -> None:
        try:
            self._zmq: Any = import_module("zmq")
        except ImportError:
            raise ConfigError("KV events need pyzmq: pip install 'penstock[zmq]'") from None
        self._told = told
        self._namespace_of = namespace_of
        self._loop = asyncio.get_running_loop()
        self._options: SimpleQueue[tuple[str, EventSource] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()
        self._worker = Worker(_NAME, self._thread.is_alive)

    def add(self, source: EventSource) -> None:
        self._options.put(("add", source))

    def remove(self, source: EventSource) -> None:
        self._options.put(("remove", source))

    def close(self) -> None:
        self._worker.stop()
        self._options.put(None)
        self._thread.join(5)

    # -- the thread

    def _run(self) -> None:
        zmq = self._zmq
        context, poller = zmq.Context(), zmq.Poller()
        readers: dict[EventSource, _Reader] = {}
        try:
            while self._take_wishes(context, poller, readers):
                ready: dict[Any, int] | None = None
                if readers:
                    with outliving(_NAME):
                        ready = dict(poller.poll(_POLL_MS))
                if ready is None:
                    threading.Event().wait(_POLL_MS / 1000)
                for reader in readers.values():
                    with outliving(_NAME):  # what one publisher sends is no reason to stop reading the others
                        self._read(reader, ready or {})
        finally:
            context.destroy(linger=0)

    def _read(self, reader: _Reader, ready: dict[Any, int]) -> None:
        changes = reader.read(ready)
        if changes or reader.has_news:
            reader.has_news = False
            self._tell(reader, changes)

    def _take_wishes(self, context: Any, poller: Any, readers: dict[EventSource, _Reader]) -> bool:
        while not self._options.empty():
            wish = self._options.get()
            if wish is None:
                return False
            what, source = wish
            with outliving(_NAME):
                if what == "add" and source not in readers:
                    readers[source] = _Reader(
                        self._zmq, context, poller, source, EngineBlocks(namespace_of=self._namespace_of)
                    )
                elif what == "remove" and (reader := readers.pop(source, None)) is not None:
                    reader.close()
        return True

    def _tell(self, reader: _Reader, changes: Changes) -> None:
        if not self._loop.is_closed():
            is_approximate = reader.stream.blocks.is_approximate
            self._loop.call_soon_threadsafe(self._told, reader.source, changes, is_approximate)


class _Reader:
    """One publisher's sockets."""

    def __init__(self, zmq: Any, context: Any, poller: Any, source: EventSource, blocks: EngineBlocks) -> None:
        self.source = source
        self.stream = KvStream(blocks, can_replay=source.replay_endpoint is not None)
        self.has_news = True  # whether it is approximate has changed
        self._zmq = zmq
        self._context = context
        self._poller = poller
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, _HWM)
        self._live.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        self._live.connect(source.endpoint)
        poller.register(self._live, zmq.POLLIN)
        self._replay: Any = None
        self._replay_until = 0.0

    def close(self) -> None:
        self._poller.unregister(self._live)
        self._live.close(linger=0)
        self._end_replay()

    def read(self, ready: dict[Any, int]) -> Changes:
        changes, was = Changes(), self.stream.blocks.is_approximate
        if self._live in ready:
            self._receive_live(changes)
        if self._replay is not None:
            self._receive_replay(changes, self._replay in ready)
        elif self.stream.wants_replay is not None:
            self._begin_replay(self.stream.wants_replay)
        self.has_news = self.has_news or was != self.stream.blocks.is_approximate
        return changes

    def _receive_live(self, changes: Changes) -> None:
        for frames in self._frames(self._live):
            if len(frames) >= 3:  # topic, number, batch
                self.stream.live(int.from_bytes(frames[-2], "big", signed=True), frames[-1], changes)
                time.sleep(0)  # hashing holds the interpreter; the event loop may want it

    def _begin_replay(self, start: int) -> None:
        zmq = self._zmq
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVHWM, _HWM)
        self._replay.connect(self.source.replay_endpoint)
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        self._poller.register(self._replay, zmq.POLLIN)
        self._replay_until = _now() + _REPLAY_S

    def _receive_replay(self, changes: Changes, is_ready: bool) -> None:
        for frames in self._frames(self._replay) if is_ready else ():
            self._replay_until = _now() + _REPLAY_S
            number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) >= 2 else _END
            if number == _END:
                self._end_replay()
                self.stream.replay_over(changes)
                return
            self.stream.replayed(number, frames[-1], changes)
            time.sleep(0)
        if _now() > self._replay_until:
            _log.warning("%s does not replay its KV events", self.source.replica_id)
            self._end_replay()
            self.stream.replay_over(changes, is_answered=False)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._poller.unregister(self._replay)
            self._replay.close(linger=0)
            self._replay = None

    def _frames(self, socket: Any) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        while len(found) < _MAX_AT_ONCE:
            try:
                found.append(socket.recv_multipart(self._zmq.NOBLOCK))
            except self._zmq.Again:
                break
        return found


def _now() -> float:
    return time.monotonic()
