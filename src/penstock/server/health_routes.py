"""/health: is the process alive; /ready: can it take requests; /health/deep: does it really work; /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from penstock.api.asgi import Request, Route
from penstock.api.openai import new_id
from penstock.api.sink import Sink, json_response, respond
from penstock.core.clock import Clock
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.request import Priority
from penstock.core.request import Request as EngineRequest
from penstock.core.sampling import SamplingParams
from penstock.engine.client import EngineClient, EngineState
from penstock.engine.messages import Embed
from penstock.observe.registry import CONTENT_TYPE
from penstock.server.devices import Devices
from penstock.server.drain import Drain
from penstock.server.engine_tally import RankNews
from penstock.server.gateway_headers import GatewayTrust
from penstock.server.lora import tally
from penstock.server.recorder import Recorder
from penstock.server.vllm_metrics import VllmMetrics


class HealthRoutes:
    def __init__(
        self,
        engine: EngineClient,
        recorder: Recorder,
        clock: Clock,
        drain: Drain,
        devices: Devices,
        trust: GatewayTrust,
        state: Callable[[], EngineState],
        *,
        deep_timeout_s: float,
    ) -> None:
        """`state`: the replica's, which is starting until its model is open, though the engine may be ready."""
        self._engine = engine
        self._recorder = recorder
        self._clock = clock
        self._drain = drain
        self._devices = devices
        self._trust = trust
        self._state = state
        self._deep_timeout_s = deep_timeout_s
        self.vllm = VllmMetrics(engine, recorder.model)
        self._probe: asyncio.Task[tuple[bool, dict[str, object]]] | None = None

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/health", self.live),
            Route("GET", "/ready", self.ready),
            Route("GET", "/health/deep", self.deep),
            Route("GET", "/metrics", self.metrics),
        ]

    async def live(self, request: Request, sink: Sink) -> None:
        """Restarting the process would help only if this fails: the engine can never come back by itself."""
        is_alive = self._engine.state not in (EngineState.FAILED, EngineState.STOPPED)
        await _answer(sink, is_alive, engine=self._engine.state)

    async def ready(self, request: Request, sink: Sink) -> None:
        state = self._state()
        is_ready = state is EngineState.READY and not self._drain.is_begun
        why = {"reason": self._drain.reason} if self._drain.is_begun else {}
        await _answer(sink, is_ready, engine=state, draining=self._drain.is_begun, **why)

    async def deep(self, request: Request, sink: Sink) -> None:
        """One real token, ahead of everybody: finds an engine that hangs though its process lives.

        It costs work and overtakes clients, so it is for gateways, and those that ask at once share one."""
        self._trust.check(request)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._prove())
        is_well, facts = await asyncio.shield(self._probe)
        await _answer(sink, is_well, engine=self._engine.state, **facts)

    async def _prove(self) -> tuple[bool, dict[str, object]]:
        try:
            latency_s = await self.first_token()
        except PenstockError as error:
            return False, {"reason": error.message}
        return True, {"latency_s": round(latency_s, 4)}

    async def first_token(self) -> float:
        """The seconds that a real token takes, ahead of everybody. Raises if none comes in time."""
        started_s = self._clock.now()
        info = self._engine.info
        probe = EngineRequest(
            id=new_id("probe"),
            prompt_ids=[0],
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0),
            priority=Priority.HIGH,
        )
        try:
            if info is not None and not info.generates:
                await asyncio.wait_for(self._engine.embeddings(Embed(probe.id, [[0]])), self._deep_timeout_s)
            else:
                with self._engine.open([probe]) as stream:
                    self._recorder.pays("", stream.meter)
                    await asyncio.wait_for(stream.next(), self._deep_timeout_s)
        except TimeoutError:
            raise EngineUnavailable("no token in time") from None
        return self._clock.now() - started_s

    def look(self) -> Callable[[], bytes]:
        """Takes down how things stand now; what it returns makes the text of it."""
        is_ready = self._state() is EngineState.READY
        self._devices.look()
        tally(self._recorder.registry, self._engine.adapters)
        self.vllm.look()
        engine = self._engine
        own = self._recorder.exposition(
            is_ready=is_ready,
            restarts=engine.restarts,
            info=engine.info,
            ranks=RankNews(engine.ranks.readings, engine.rank_figures),
            experts=engine.experts,
        )
        return lambda: own() + self.vllm.exposition()

    async def metrics(self, request: Request, sink: Sink) -> None:
        body = await asyncio.to_thread(self.look())  # milliseconds, in which streams go on
        await respond(sink, 200, body, [(b"content-type", CONTENT_TYPE.encode())])


async def _answer(sink: Sink, is_well: bool, **facts: object) -> None:
    body = {"status": "ok" if is_well else "unavailable", **facts}
    await json_response(sink, 200 if is_well else 503, msgspec.json.encode(body))
