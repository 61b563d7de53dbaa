"""The replica's HTTP application: its routes over one engine."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

from penstock.api.asgi import Receive, Request, Route, Router, Scope, Send
from penstock.core.clock import Clock
from penstock.core.errors import EngineUnavailable
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineClient
from penstock.server.health_routes import HealthRoutes
from penstock.server.openai_routes import OpenAIRoutes
from penstock.server.prompts import PromptEncoder
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel


class Replica:
    """The ASGI application: health and metrics from the first moment, the model's routes once it is loaded."""

    def __init__(self, engine: EngineClient, recorder: Recorder, clock: Clock, settings: ServerSettings) -> None:
        self._engine = engine
        self._recorder = recorder
        self._clock = clock
        self._settings = settings
        self._health = HealthRoutes(engine, recorder, clock, deep_timeout_s=settings.deep_health_timeout_s).routes()
        refusals = [Route(method, "/v1/{path}", self._refuse) for method in ("GET", "POST")]
        self._router = Router([*self._health, *refusals], shutdown=engine.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)

    def open(self, model: ServedModel) -> None:
        """The engine is ready: take requests for its model."""
        gc.freeze()  # what is loaded by now stays: the garbage collector need not stop a stream to look through it
        encoder = PromptEncoder(model, ThreadPoolExecutor(thread_name_prefix="tokenize"))
        openai = OpenAIRoutes(
            model,
            self._engine,
            encoder,
            self._recorder,
            self._clock,
            max_open=self._settings.max_open,
            max_body_bytes=self._settings.max_body_bytes,
        )
        self._router = Router([*openai.routes(), *self._health], shutdown=self._engine.stop)

    async def _refuse(self, request: Request, send: Send) -> None:
        raise EngineUnavailable("the model is being loaded", retry_after_s=5.0)
