"""The replica's HTTP application: its routes over one engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock.api.asgi import Router
from penstock.core.clock import Clock
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineClient
from penstock.server.health_routes import HealthRoutes
from penstock.server.openai_routes import OpenAIRoutes
from penstock.server.prompts import PromptEncoder
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel


def make_app(
    model: ServedModel, engine: EngineClient, recorder: Recorder, clock: Clock, settings: ServerSettings
) -> Router:
    encoder = PromptEncoder(model, ThreadPoolExecutor(thread_name_prefix="tokenize"))
    openai = OpenAIRoutes(
        model, engine, encoder, recorder, clock, max_open=settings.max_open, max_body_bytes=settings.max_body_bytes
    )
    health = HealthRoutes(engine, recorder, clock, deep_timeout_s=settings.deep_health_timeout_s)
    return Router([*openai.routes(), *health.routes()], shutdown=engine.stop)
