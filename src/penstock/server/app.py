"""The replica's HTTP application: its routes over one engine."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

from penstock.api.asgi import Receive, Request, Route, Router, Scope, Send
from penstock.api.errors import ANTHROPIC, OPENAI
from penstock.api.page_guard import PageGuard
from penstock.api.replica_report import ReplicaReport
from penstock.api.sink import Sink
from penstock.core.clock import Clock
from penstock.core.errors import EngineUnavailable
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineClient, EngineState
from penstock.http.outside import Outside
from penstock.hub.lora_file import AdapterFile
from penstock.hub.watermarks import WatermarkFile
from penstock.server import anthropic_routes, batch_routes, openai_routes, responses_routes
from penstock.server.block_routes import BlockRoutes
from penstock.server.devices import Devices
from penstock.server.drain import Drain
from penstock.server.embedding_routes import EmbeddingRoutes
from penstock.server.expert_routes import ExpertRoutes
from penstock.server.gateway_headers import GatewayTrust
from penstock.server.gateway_routes import GatewayRoutes
from penstock.server.guides import GuideTrials
from penstock.server.health_routes import HealthRoutes
from penstock.server.images import Images
from penstock.server.lora import Adapters
from penstock.server.lora_routes import AdapterRoutes
from penstock.server.offload import Offload
from penstock.server.parking import Parking
from penstock.server.pipeline import Pipeline
from penstock.server.prepare import Preparer
from penstock.server.reasoning import ReasoningLimits
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel
from penstock.server.text_models import EngineTexts
from penstock.server.token_routes import TokenRoutes


class Replica:
    """The ASGI application: health and metrics from the first moment, the model's routes once it is loaded."""

    def __init__(self, engine: EngineClient, recorder: Recorder, clock: Clock, settings: ServerSettings) -> None:
        self._engine = engine
        self._recorder = recorder
        self._clock = clock
        self._settings = settings
        self.outside: Outside | None = None  # where images are fetched; None: as the settings say
        self.drain = Drain()
        pages = PageGuard(settings.host, settings.allowed_hosts, settings.allowed_origins)
        self.trust = GatewayTrust(settings.gateway_secret, settings.metrics_token, pages)
        self._guides: GuideTrials | None = None
        self.devices = Devices(recorder.registry, clock, recorder.model, self.drain.begin)
        health = HealthRoutes(
            engine,
            recorder,
            clock,
            self.drain,
            self.devices,
            self.trust,
            self._state,
            deep_timeout_s=settings.deep_health_timeout_s,
        )
        self.look = health.look  # before its numbers are read
        self._vllm_metrics = health.vllm
        self._parking = Parking(engine, self.drain, clock, health.first_token)
        self._gateway = GatewayRoutes(
            engine, self.drain, self._parking, self.devices, self.trust, self._state, settings
        )
        blocks = BlockRoutes(engine, self.drain, self.trust)
        experts = ExpertRoutes(engine, self.trust)
        self._always = [*health.routes(), *self._gateway.routes(), *blocks.routes(), *experts.routes()]
        paths = {"/v1/messages": ANTHROPIC, "/v1/messages/count_tokens": ANTHROPIC, "/v1/{path}": OPENAI}
        refusals = [
            Route(method, path, self._refuse, form) for path, form in paths.items() for method in ("GET", "POST")
        ]
        self._router = Router([*self._always, *refusals], guard=self.trust.guard, shutdown=engine.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)

    def report(self) -> ReplicaReport:
        """The report that gateways get."""
        return self._gateway.now()

    def adapters(self, model: ServedModel) -> Adapters:
        """The adapters of a model that is not open yet."""
        return Adapters(model, self._engine, AdapterFile.of(model.name, self._settings.adapter_file))

    def open(self, model: ServedModel, adapters: Adapters | None = None) -> None:
        """Takes requests for the model of an engine that is ready."""
        gc.freeze()  # what is loaded by now stays: the garbage collector need not stop a stream to look through it
        pool = ThreadPoolExecutor(thread_name_prefix="tokenize")
        self._gateway.open(model, pool)
        self._vllm_metrics.adapters = model.adapters
        offload = Offload(pool)
        self._guides = GuideTrials(
            self._gateway.encoded_text, model.config.eos_token_ids, self._recorder.registry, self._clock
        )
        preparer = Preparer(
            model,
            offload,
            self._guides,
            WatermarkFile.at(self._settings.watermark_file),
            watermark=self._settings.watermark,
            max_open=self._settings.max_open,
            images=Images(model, self._settings, self.outside),
            reasoning=ReasoningLimits(self._settings.reasoning_budget, self._settings.max_reasoning_budget),
        )
        pipeline = Pipeline(
            preparer,
            self._engine,
            self._recorder,
            self._clock,
            self.drain,
            self.trust,
            offload,
            max_open=self._settings.max_open,
            max_body_bytes=self._settings.max_body_bytes,
        )
        lora = AdapterRoutes(adapters or self.adapters(model), self.trust).routes()
        texts = EmbeddingRoutes(
            EngineTexts(model, self._engine),
            self._recorder,
            self.drain,
            self.trust,
            offload,
            max_body_bytes=self._settings.max_body_bytes,
        ).routes()
        tokens = TokenRoutes(model, self._recorder, offload, max_body_bytes=self._settings.max_body_bytes).routes()
        generating = [
            *openai_routes.routes(pipeline, model),
            *anthropic_routes.routes(pipeline),
            *responses_routes.routes(pipeline),
            *batch_routes.routes(),
        ]
        routes = [*generating, *lora, *texts, *tokens, *self._always]
        self._router = Router(routes, guard=self.trust.guard, shutdown=self._stop)

    def _state(self) -> EngineState:
        """The engine's state; nothing is ready before the model is open: its adapters are still to be loaded."""
        is_early = self._guides is None and self._engine.state is EngineState.READY
        return EngineState.STARTING if is_early else self._parking.state

    async def _stop(self) -> None:
        await self._engine.stop()
        if self._guides is not None:
            await self._guides.close()

    async def _refuse(self, request: Request, sink: Sink) -> None:
        raise EngineUnavailable("the model is being loaded", retry_after_s=5.0)
