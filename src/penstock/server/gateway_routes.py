"""What only a gateway asks of a replica: how it is, once or as it changes, and that it should drain.

GET  /v1/penstock/snapshot     a ReplicaReport
GET  /v1/penstock/snapshots    the same as server-sent events: on change, at most every 50 ms, at least every 250
POST /v1/penstock/drain        take no new work and give relayed streams back; answers at once with a snapshot
"""

from __future__ import annotations

import asyncio
import uuid

import msgspec

from penstock.api import sse
from penstock.api.asgi import Request, Route, Send, SseStream, json_response
from penstock.api.replica_report import ReplicaReport
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineClient
from penstock.server.drain import Drain
from penstock.server.incoming import GatewayTrust

_PERIOD_S = 0.05
_MOST_PERIODS = 5  # without news: a gateway takes a replica that is silent for a second for a sick one

encode = msgspec.json.Encoder().encode


class GatewayRoutes:
    def __init__(self, engine: EngineClient, drain: Drain, trust: GatewayTrust, settings: ServerSettings) -> None:
        self.model = ""  # as long as it is loading
        self._engine = engine
        self._drain = drain
        self._trust = trust
        self._max_open = settings.max_open
        self._boot = uuid.uuid4().hex

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/penstock/snapshot", self.snapshot),
            Route("GET", "/v1/penstock/snapshots", self.snapshots),
            Route("POST", "/v1/penstock/drain", self.drain),
        ]

    async def snapshot(self, request: Request, send: Send) -> None:
        self._trust.check(request)
        await json_response(send, 200, encode(self._now()))

    async def snapshots(self, request: Request, send: Send) -> None:
        self._trust.check(request)
        await request.body(0)
        await request.while_connected(self._push(send))

    async def drain(self, request: Request, send: Send) -> None:
        self._trust.check(request)
        self._drain.begin()
        await json_response(send, 200, encode(self._now()))

    async def _push(self, send: Send) -> None:
        async with SseStream(send) as stream:
            last, age = None, 0
            while True:
                is_last = self._drain.is_stopping
                report = self._now()
                if report != last or age >= _MOST_PERIODS:
                    await stream.write(sse.event(encode(report)))
                    last, age = report, 0
                if is_last:
                    return
                await asyncio.sleep(_PERIOD_S)
                age += 1

    def _now(self) -> ReplicaReport:
        engine, stats, info = self._engine, self._engine.stats, self._engine.info
        report = ReplicaReport(
            boot=self._boot,
            model=self.model,
            state=engine.state,
            is_draining=self._drain.is_begun,
            num_open=engine.num_open,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            queued_tokens=stats.queued_tokens,
            steps=stats.steps,
            restarts=engine.restarts,
            prefill_tokens_per_s=engine.speed.prefill_tokens_per_s,
            decode_step_s=engine.speed.decode_step_s,
            max_open=self._max_open,
        )
        if info is None:
            return report
        capacity = info.num_blocks * info.block_size
        return msgspec.structs.replace(
            report,
            kv_active_tokens=round(stats.kv_usage * capacity),
            kv_capacity_tokens=capacity,
            max_num_seqs=info.max_num_seqs,
            chunk_tokens=info.chunk_tokens,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
        )
