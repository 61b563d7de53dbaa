"""Follows what one replica's KV cache holds, and tells an index of it.

The replica is the source of truth: every connection begins with a snapshot, so whatever was lost, the next one makes
the index exact. What is known stays while the connection is only cut; it is forgotten when the replica cannot be
reached, since a process that is gone took its cache with it. Nothing here knows how the index is made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.api import kv_blocks
from penstock.api.kv_blocks import HASH_BYTES, BlockNews
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.replica import STALE_AFTER_S
from penstock.gateway.replicas.silence import SilenceTimer
from penstock.http.call import Call, Failure
from penstock.http.clock import Timer
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream

_RETRY_S, _MAX_RETRY_S = 0.1, 0.5
_ABSENT_S = 10.0  # a server that has no such stream may be replaced by one that has
_SLICE_BYTES = 512 * HASH_BYTES  # so many at a time: the loop is never held for a millisecond


class BlockIndex(Protocol):
    """Told which routing blocks a replica holds. Telling it what it knows already changes nothing."""

    def reset(self, replica_id: str, hashes: Sequence[int]) -> None: ...

    def stored(self, replica_id: str, hashes: Sequence[int]) -> None:
        """On its device."""

    def stored_on_host(self, replica_id: str, hashes: Sequence[int]) -> None:
        """In its host memory only."""

    def removed(self, replica_id: str, hashes: Sequence[int]) -> None: ...

    def lost_track(self, replica_id: str) -> None:
        """Marks what is known of the replica as possibly old, until `reset`."""

    def forget(self, replica_id: str) -> None: ...


class KvFollower:
    """From its making until `close`, in the running loop. `headers` are rendered lines, with the replica's secret."""

    def __init__(
        self,
        replica_id: str,
        upstream: Upstream,
        headers: bytes,
        index: BlockIndex,
        size: int = ROUTING_TOKENS,
        silent_after_s: float = STALE_AFTER_S,  # the replica writes every 400 ms at least
    ) -> None:
        self._replica_id = replica_id
        self._upstream = upstream
        self._headers = headers
        self._index = index
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._clock = upstream.clock
        self._call: Call | None = None
        self._timer: Timer | None = None
        self._silence = SilenceTimer(self._clock, silent_after_s, self._lost)
        self._retry_s = _RETRY_S
        self._status = 0
        self._is_stream = False
        self._rest = b""
        self._last: BlockNews | None = None  # of this connection
        self._is_useful = False  # its blocks are as large as ours
        self._todo: deque[tuple[Callable[[str, Sequence[int]], None], bytes]] = deque()
        self._turn: asyncio.Handle | None = None
        self._connect()

    @property
    def is_exact(self) -> bool:
        """The index has everything that the replica has said, and the replica is there to say more."""
        return self._last is not None and self._is_useful and not self._todo

    def close(self) -> None:
        self._disconnect()
        self._index.forget(self._replica_id)

    # -- what the replica says

    def head(self, head: ResponseHead) -> None:
        content_type = head.headers.get(b"content-type", b"")
        self._status = head.status
        self._is_stream = head.status == 200 and content_type.startswith(b"text/event-stream")

    def data(self, data: bytes, is_last: bool) -> None:
        self._silence.heard()
        if self._is_stream:
            *events, self._rest = (self._rest + data).split(b"\n\n")
            is_last |= not all(map(self._take, events))
        if is_last:
            if 400 <= self._status < 500:
                self._retry_s = _ABSENT_S
            self._lost()

    def failed(self, failure: Failure) -> None:
        self._lost()

    def _take(self, event: bytes) -> bool:
        """False: this does not follow what came before."""
        if event.startswith(b":"):
            return True
        news = kv_blocks.decode(event.removeprefix(b"data: "))
        if news is None:
            return False
        last, self._last = self._last, news
        if news.hashes is not None:
            self._retry_s = _RETRY_S
            self._begin(news, news.hashes)
            return True
        if last is None or (last.boot, last.seq) != (news.boot, news.after):
            return False
        if self._is_useful:
            self._add(self._index.stored, news.stored)
            self._add(self._index.stored_on_host, news.host)
            self._add(self._index.removed, news.removed)
        return True

    # -- telling the index

    def _begin(self, news: BlockNews, hashes: bytes) -> None:
        self._drop()
        self._is_useful = news.size == self._size
        if self._is_useful:
            self._todo.append((self._index.reset, hashes[:_SLICE_BYTES]))
            self._add(self._index.stored, hashes[_SLICE_BYTES:])
            self._add(self._index.stored_on_host, news.host)
        else:
            self._index.forget(self._replica_id)

    def _add(self, tell: Callable[[str, Sequence[int]], None], packed: bytes) -> None:
        for start in range(0, len(packed), _SLICE_BYTES):
            self._todo.append((tell, packed[start : start + _SLICE_BYTES]))
        if self._todo and self._turn is None:
            self._turn = self._loop.call_soon(self._work)

    def _work(self) -> None:
        """One slice; the next one when everybody else had a turn."""
        tell, packed = self._todo.popleft()
        self._turn = self._loop.call_soon(self._work) if self._todo else None
        tell(self._replica_id, kv_blocks.unpack(packed))

    def _drop(self) -> None:
        self._todo.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    # -- the connection

    def _connect(self) -> None:
        self._last, self._rest, self._is_stream = None, b"", False
        self._call = self._upstream.send(b"GET", kv_blocks.PATH.encode(), self._headers, b"", self)
        self._silence.begin()

    def _lost(self) -> None:
        if self._last is None:
            self._index.forget(self._replica_id)
        elif self._is_useful:
            self._index.lost_track(self._replica_id)
        self._disconnect()
        self._timer = self._clock.call_later(self._retry_s, self._connect)
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)

    def _disconnect(self) -> None:
        self._drop()
        self._last = None
        self._silence.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._call is not None:
            self._call.cancel()
            self._call = None
