"""A foreign server followed by a gateway's own parts, without a door: the replica, its follower, requests to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.core.replica import ReplicaSnapshot
from penstock.dialects.engines import DIALECTS
from penstock.gateway.foreign import ForeignFollower
from penstock.gateway.health.settings import HealthSettings
from penstock.gateway.http.call import Call, Failure
from penstock.gateway.http.message import ResponseHead
from penstock.gateway.http.upstream import Upstream
from penstock.gateway.replicas import Replica
from penstock.gateway.translated import ForeignUpstream
from tests.patience import Patience

QUICK = HealthSettings(probe_every_s=0.1, hung_after_s=0.6, deep_probe_timeout_s=1.0, probe_timeout_s=1.0)


class Rider:
    """A request that is at the replica."""

    is_stream = True

    def __init__(self) -> None:
        self.is_lost = False

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
        self.status, self.headers = head

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
    def __init__(self, replica: Replica, follower: ForeignFollower, upstream: ForeignUpstream) -> None:
        self.replica = replica
        self.follower = follower
        self.upstream = upstream

    @property
    def seen(self) -> ReplicaSnapshot:
        return self.replica.seen(asyncio.get_running_loop().time())

    @property
    def state(self) -> str:
        return str(self.seen.state_at(asyncio.get_running_loop().time()))

    def send(self, path: str, body: bytes) -> tuple[Call, Received]:
        received = Received()
        return self.upstream.send(b"POST", path.encode(), self.replica.headers, body, received), received

    async def ask(self, path: str = "/v1/completions", **asked: Any) -> Received:
        _, received = self.send(path, msgspec.json.encode({"model": self.replica.model, **asked}))
        async with asyncio.timeout(60):
            await received.over.wait()
        return received


async def eventually(is_so: Callable[[], object], timeout_s: float = 10.0) -> None:
    patience = Patience(timeout_s)
    while not is_so():  # a server in another thread tells nobody
        patience.look()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(
    url: str,
    *,
    model: str = "m",
    dialect: str | None = None,
    metrics: str | None = None,
    health: HealthSettings = QUICK,
    **options: Any,
) -> AsyncIterator[Following]:
    upstream = ForeignUpstream.from_url(url)
    assert isinstance(upstream, ForeignUpstream)
    replica = Replica(url, model=model, upstream=upstream, health=health, **options)
    follower = ForeignFollower(
        replica,
        lambda: None,
        dialect=DIALECTS[dialect] if dialect else None,
        metrics=Upstream.from_url(metrics) if metrics else None,
    )
    try:
        yield Following(replica, follower, upstream)
    finally:
        follower.close()
        upstream.close()
