"""Contents of the engine's KV cache, for gateways that route by them.

GET  /v1/penstock/blocks    server-sent events: a snapshot, then changes, at most every 50 ms, at least every 400

A reader that is too slow for the changes gets a new snapshot instead of them; so does everybody when the engine starts
again.
"""

from __future__ import annotations

import asyncio

from penstock.api import kv_blocks, sse
from penstock.api.asgi import Request, Route
from penstock.api.kv_blocks import BlockNews, pack
from penstock.api.sink import Sink, SseStream
from penstock.engine.client import EngineClient
from penstock.server.drain import Drain
from penstock.server.gateway_headers import GatewayTrust

_PERIOD_S = 0.05
_MAX_PERIODS = 8  # without news: a gateway reconnects to a replica that is silent for a second


class BlockRoutes:
    def __init__(self, engine: EngineClient, drain: Drain, trust: GatewayTrust) -> None:
        self._engine = engine
        self._drain = drain
        self._trust = trust

    def routes(self) -> list[Route]:
        return [Route("GET", kv_blocks.PATH, self.blocks)]

    async def blocks(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        await request.body(0)
        await request.while_connected(self._push(sink))

    async def _push(self, sink: Sink) -> None:
        async with SseStream(sink) as stream:
            last = self._snapshot()
            await stream.write(sse.event(kv_blocks.encode(last)))
            age = 0
            while not self._drain.is_stopping:
                await asyncio.sleep(_PERIOD_S)
                age += 1
                cache = self._engine.cache
                if (cache.boot, cache.seq) != (last.boot, last.seq) or age >= _MAX_PERIODS:
                    last, age = self._news(last), 0
                    await stream.write(sse.event(kv_blocks.encode(last)))

    def _snapshot(self) -> BlockNews:
        cache = self._engine.cache
        hashes, host = pack(cache.hashes), pack(cache.on_host)
        return BlockNews(cache.boot, cache.seq, size=cache.size, hashes=hashes, host=host)

    def _news(self, last: BlockNews) -> BlockNews:
        cache = self._engine.cache
        changes = cache.since(last.seq) if cache.boot == last.boot else None
        if changes is None:
            return self._snapshot()
        stored, removed, on_host = map(pack, changes)
        return BlockNews(cache.boot, cache.seq, after=last.seq, stored=stored, removed=removed, host=on_host)
