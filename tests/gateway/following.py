"""A foreign server followed by a gateway's own parts, without a door: the replica, its follower, requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from penstock.core.replica import ReplicaSnapshot
from penstock.dialects.engines import DIALECTS
from penstock.gateway.replicas.dialect_upstream import DialectUpstream
from penstock.gateway.replicas.engine_poller import EnginePoller
from penstock.gateway.replicas.replica import Replica
from penstock.health.settings import HealthSettings
from penstock.http.call import Call, Failure
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream
from tests.clocks import ManualClock
from tests.waiting import GIVE_UP_S, eventually_async

T = TypeVar("T")

QUICK = HealthSettings(probe_every_s=0.1, hung_after_s=0.6, deep_probe_timeout_s=1.0, probe_timeout_s=1.0)

_TURNS = 5  # of the event loop, in which a task that was woken sends what it has to send


class InFlightRequest:
    """A request that is at the replica."""

    is_stream = True

    def __init__(self) -> None:
        self.is_lost = False

    def id_to_move(self) -> None:
        return None

    def replica_lost(self) -> None:
        self.is_lost = True


@dataclass
class Received:
    """Receiver of an answer."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    failure: Failure | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def head(self, head: ResponseHead) -> None:
        self.status, self.headers = head.status, head.headers

    def data(self, data: bytes, is_last: bool) -> None:
        self.body += data
        if is_last:
            self.over.set()

    def failed(self, failure: Failure) -> None:
        self.failure = failure
        self.over.set()

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Following:
    def __init__(self, replica: Replica, follower: EnginePoller, upstream: DialectUpstream) -> None:
        self.replica = replica
        self.follower = follower
        self.upstream = upstream

    @property
    def seen(self) -> ReplicaSnapshot:
        return self.replica.seen(self.upstream.clock.now())

    @property
    def state(self) -> str:
        return str(self.seen.state_at(self.upstream.clock.now()))

    async def until(self, look: Callable[[], T], is_so: Callable[[T], object] = bool) -> T:
        """Waits for a condition, and lets time pass on a clock of the test's own: whenever nothing is under way to the
        server, until the next timer. So no answer is ever late, however slow the machine is."""
        clock = self.upstream.clock
        if not isinstance(clock, ManualClock):
            return await eventually_async(look, is_so)
        value = look()
        give_up_s = time.monotonic() + GIVE_UP_S
        while not is_so(value):
            assert time.monotonic() < give_up_s, f"it never happened; the last look saw {value!r}"
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if self._is_asking or not clock.advance_to_next():
                await asyncio.sleep(0.001)  # the server is another thread
            value = look()
        return value

    @property
    def _is_asking(self) -> bool:
        ways = [self.upstream, *self.follower._others.values()]
        if self.follower._metrics is not None:
            ways.append(self.follower._metrics)
        return any(way.num_open > way.num_idle for way in ways)

    def send(self, path: str, body: bytes) -> tuple[Call, Received]:
        received = Received()
        return self.upstream.send(b"POST", path.encode(), self.replica.headers, body, received), received

    async def ask(self, path: str = "/v1/completions", **asked: Any) -> Received:
        _, received = self.send(path, msgspec.json.encode({"model": self.replica.model, **asked}))
        async with asyncio.timeout(GIVE_UP_S):
            await received.over.wait()
        return received


@contextlib.asynccontextmanager
async def following(
    url: str,
    *,
    model: str = "m",
    dialect: str | None = None,
    metrics: str | None = None,
    health: HealthSettings = QUICK,
    clock: TimerClock = LOOP_CLOCK,
    **options: Any,
) -> AsyncIterator[Following]:
    upstream = DialectUpstream.from_url(url, clock=clock)
    assert isinstance(upstream, DialectUpstream)
    replica = Replica(url, model=model, upstream=upstream, health=health, **options)
    follower = EnginePoller(
        replica,
        lambda: None,
        dialect=DIALECTS[dialect] if dialect else None,
        metrics=Upstream.from_url(metrics, clock=clock) if metrics else None,
    )
    try:
        yield Following(replica, follower, upstream)
    finally:
        follower.close()
        upstream.close()
