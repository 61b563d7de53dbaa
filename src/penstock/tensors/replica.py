"""The replica's application where models take tensors: health, metrics, what gateways ask, the calls of the Open
Inference Protocol, which are answered here without a detour, and the endpoints for texts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.api import sse
from penstock.api.asgi import Receive, Request, Route, Router, Scope, Send
from penstock.api.errors import OPEN_INFERENCE
from penstock.api.oip.tensor_call import CALL_BYTES, TENSORS_PATH
from penstock.api.openai.models import ModelCard, model_list, model_object
from penstock.api.page_guard import PageGuard
from penstock.api.replica_report import ReplicaReport, TensorNews, encode
from penstock.api.sink import Sink, SseStream, json_response, respond
from penstock.core.config import shown
from penstock.core.errors import (
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PenstockError,
    UnsupportedParameter,
    UnsupportedTask,
)
from penstock.core.measurements import EngineLoad, EngineMeasurements, ServingLimits
from penstock.core.settings import ServerSettings
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.clock import sleep as sleep_on
from penstock.http.exchange import NOBODY
from penstock.observe.registry import CONTENT_TYPE
from penstock.oip.inner_exchange import Caller
from penstock.oip.tensor_calls import TensorBody
from penstock.oip.tensor_relay import answer_call, open_call, pack
from penstock.server.drain import Drain
from penstock.server.embedding_routes import EmbeddingRoutes
from penstock.server.gateway_headers import GatewayTrust
from penstock.server.offload import Offload
from penstock.server.text_models import Task, TextModel
from penstock.tensors.model_repository import ModelRepository
from penstock.tensors.model_settings import ModelSettings, settings_of
from penstock.tensors.onnx_model import Place
from penstock.tensors.recorder import TensorRecorder
from penstock.tensors.served_model import Inference, ServedVersion
from penstock.tensors.wire import read_request, write_answer

_PERIOD_S = 0.05
_MAX_PERIODS = 5  # without news: a gateway takes a replica that is silent for a second for a sick one
_LONG_BYTES = 128 << 10  # of a body, which is read in a thread
_PATHS: dict[Task, str] = {
    "embeddings": "/v1/embeddings",
    "relevance": "/v1/rerank and /v1/score",
    "classification": "/v1/classify",
}
_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


class TensorReplica:
    """The ASGI application, and the `TensorCalls`, `RepositoryCalls` and `TextModels` of its models."""

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        created: int,
        paths: Callable[[], Mapping[str, Path]],
        place: Place = Place(),  # noqa: B008 (a tuple)
        clock: TimerClock = LOOP_CLOCK,
    ) -> None:
        """`name`: that gateways know it by: its model's, if it has one; `created`: Unix time; `paths`: of its models,
        by name."""
        self.name = name
        self.drain = Drain()
        self.trust = GatewayTrust(
            settings.gateway_secret,
            settings.metrics_token,
            PageGuard(settings.host, settings.allowed_hosts, settings.allowed_origins),
        )
        self.recorder = TensorRecorder(clock, name)
        self.repository = ModelRepository(paths, place, clock=clock, observer=self.recorder)
        self.startup_s: Mapping[str, float] = {}
        self._clock = clock
        self._settings = settings
        self._is_open = False
        self._is_stopped = False
        self._boot = uuid.uuid4().hex
        self._created = created
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        texts = EmbeddingRoutes(
            self,
            self.recorder,
            self.drain,
            self.trust,
            Offload(self._threads),
            max_body_bytes=settings.max_body_bytes,
        )
        self._texts = texts.routes()
        self._router = Router(self._routes(), guard=self.trust.guard, shutdown=self.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)

    def open(self, startup_s: Mapping[str, float]) -> None:
        """Its models are loaded."""
        self._is_open, self.startup_s = True, startup_s

    async def stop(self) -> None:
        self._is_stopped = True
        self.repository.stop()
        self._threads.shutdown(wait=False)

    @property
    def state(self) -> str:
        if self._is_stopped:
            return "stopped"
        return "ready" if self._is_open else "starting"

    async def run(self, version: ServedVersion, asked: Inference) -> dict[str, Any]:
        """Raises what a client may be told: that it is full, drains, or that the request is wrong."""
        if self.drain.num_running >= self._settings.max_open:
            raise Overloaded(f"{self._settings.max_open} requests are open, as many as may", reason="max_open")
        with self.drain.admit(_Running(), ""):
            return await version.infer(asked)

    # -- calls of the protocol

    def owns(self, model: str) -> bool:
        return True  # there are no others here

    async def infer(self, caller: Caller, model: str, version: str, body: TensorBody) -> TensorBody:
        self._admit(caller)
        with self.recorder.request("infer", convention=OPEN_INFERENCE, model=self._label(model)):
            found = self._find(model, version)
            if len(body.data) <= _LONG_BYTES:
                asked = read_request(body.data, body.json_length)
            else:
                asked = await asyncio.to_thread(read_request, body.data, body.json_length)
                found = self._find(model, version)  # it may have been loaded anew meanwhile
            found.signature.check_outputs(asked.inference.outputs)
            answer = await self.run(found, asked.inference)
            is_batched = found.signature.max_batch_size > 0
            version = str(found.version)
            return TensorBody(*write_answer(found.name, version, asked, answer, found.labels, is_batched=is_batched))

    async def is_ready(self, caller: Caller, model: str, version: str) -> bool:
        self._admit(caller)
        try:
            self._find(model, version)
        except EngineUnavailable:
            return False
        return not self.drain.is_begun

    async def metadata(self, caller: Caller, model: str, version: str) -> dict[str, Any]:
        self._admit(caller)
        return self.repository.find(model).metadata(version)

    async def config(self, caller: Caller, model: str, version: str) -> dict[str, Any]:
        self._admit(caller)
        return config_of(self._find(model, version))

    async def statistics(self, caller: Caller, model: str, version: str) -> dict[str, Any]:
        self._admit(caller)
        if model and version:
            versions = [self._find(model, version)]
        else:  # no model: all of them
            models = [self.repository.find(model)] if model else self.repository.loaded.values()
            versions = [one for found in models for one in found.versions.values()]
        return {"model_stats": [one.statistics.as_dict(one.name, str(one.version)) for one in versions]}

    # -- calls about the repository

    async def index(self, caller: Caller, *, only_ready: bool) -> list[dict[str, Any]]:
        self._admit(caller)
        return self.repository.index(only_ready=only_ready)

    async def load(self, caller: Caller, model: str, parameters: Mapping[str, object]) -> None:
        self.trust.check_caller(caller.headers, caller.peer)
        await self.repository.load(model, _settings_in(parameters))

    async def unload(self, caller: Caller, model: str, parameters: Mapping[str, object]) -> None:
        self.trust.check_caller(caller.headers, caller.peer)
        for name in parameters:
            if name != "unload_dependents":  # there are none here
                raise UnsupportedParameter(f"the parameter '{shown(name)}' is not known", param=shown(name))
        await self.repository.unload(model)

    # -- texts

    def find_text_model(self, name: str, task: Task) -> TextModel:
        texts = self.repository.find(name).texts
        if isinstance(texts, str):
            said = f"the model '{name}' takes tensors, over the Open Inference Protocol, and no texts: {texts}"
            raise UnsupportedTask(said, param="model")
        if task not in texts.tasks:
            can = " and ".join(_PATHS[one] for one in texts.tasks)
            raise UnsupportedTask(f"the model '{name}' answers at {can}", param="model")
        return texts

    # -- inside

    def _admit(self, caller: Caller) -> None:
        self.trust.admit_socket(caller.headers, caller.peer)

    def _find(self, model: str, version: str) -> ServedVersion:
        return self.repository.find(model).find(version)

    def _label(self, model: str) -> str:
        """The model's label in metrics: a client's name only if it is loaded, as a client can name anything."""
        return model if model in self.repository.loaded else self.name

    # -- other paths

    def _routes(self) -> list[Route]:
        return [
            Route("GET", "/health", self._live),
            Route("GET", "/ready", self._ready),
            Route("GET", "/health/deep", self._deep),
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/v1/models", self._models),
            Route("GET", "/v1/models/{model}", self._one_model),
            Route("GET", "/v1/penstock/snapshot", self._snapshot),
            Route("GET", "/v1/penstock/snapshots", self._snapshots),
            Route("POST", TENSORS_PATH, self._passed_on),
            Route("POST", "/v1/penstock/drain", self._drain),
            Route("DELETE", "/v1/penstock/drain", self._undrain),
            *self._texts,
            *(Route("POST", path, self._no_text) for path in _GENERATES),
        ]

    async def _live(self, request: Request, sink: Sink) -> None:
        await _tell(sink, not self._is_stopped, engine=self.state)

    async def _deep(self, request: Request, sink: Sink) -> None:
        """Whether each version has an instance that is there: what a model takes nobody knows, so none is asked."""
        versions = [one for model in self.repository.loaded.values() for one in model.versions.values()]
        is_well = self.state == "ready" and bool(versions) and all(one.is_alive for one in versions)
        await _tell(sink, is_well, engine=self.state)

    async def _ready(self, request: Request, sink: Sink) -> None:
        why = {"reason": self.drain.reason} if self.drain.is_begun else {}
        is_ready = self.state == "ready" and not self.drain.is_begun
        await _tell(sink, is_ready, engine=self.state, draining=self.drain.is_begun, **why)

    async def _metrics(self, request: Request, sink: Sink) -> None:
        models = self.repository.loaded.values()
        body = self.recorder.exposition(models, self.startup_s, is_ready=self.state == "ready")
        await respond(sink, 200, body, [(b"content-type", CONTENT_TYPE.encode())])

    async def _models(self, request: Request, sink: Sink) -> None:
        await json_response(sink, 200, model_list([self._card(name) for name in self.repository.loaded]))

    async def _one_model(self, request: Request, sink: Sink) -> None:
        await json_response(sink, 200, model_object(self._card(self.repository.find(request.path_param).name)))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._created, root=name)

    async def _no_text(self, request: Request, sink: Sink) -> None:
        if not self._is_open:
            raise EngineUnavailable("the model is being loaded", retry_after_s=5.0)
        names = ", ".join(f"'{name}'" for name in self.repository.loaded) or "none yet"
        raise UnsupportedTask(f"this server's models ({names}) make no texts", param="model")

    async def _passed_on(self, request: Request, sink: Sink) -> None:
        """A call that came over a gateway."""
        asked = open_call(await request.body(self._settings.max_body_bytes + CALL_BYTES))
        caller = Caller(dict(request.raw_headers), request.client or NOBODY)
        found = await request.while_connected(answer_call(self, caller, asked))
        data = pack(found)
        length = (b"content-length", b"%d" % len(data))
        await respond(sink, 200, data, [(b"content-type", b"application/octet-stream"), length])

    async def _snapshot(self, request: Request, sink: Sink) -> None:
        self.trust.check(request)
        await json_response(sink, 200, encode(self.report()))

    async def _snapshots(self, request: Request, sink: Sink) -> None:
        self.trust.check(request)
        await request.body(0)
        await request.while_connected(self._push(sink))

    async def _drain(self, request: Request, sink: Sink) -> None:
        self.trust.check(request)
        self.drain.begin()
        await json_response(sink, 200, encode(self.report()))

    async def _undrain(self, request: Request, sink: Sink) -> None:
        self.trust.check(request)
        self.drain.cancel()
        await json_response(sink, 200, encode(self.report()))

    async def _push(self, sink: Sink) -> None:
        async with SseStream(sink) as stream:
            last, age = None, 0
            while True:
                is_last = self.drain.is_over
                report = self.report()
                if report != last or age >= _MAX_PERIODS:
                    await stream.write(sse.event(encode(report)))
                    last, age = report, 0
                if is_last:
                    return
                await sleep_on(self._clock, _PERIOD_S)
                age += 1

    def report(self) -> ReplicaReport:
        """The report that gateways get."""
        loaded = self.repository.loaded
        versions = [version for model in loaded.values() for version in model.versions.values()]
        num_open = sum(one.num_open for one in versions)
        num_waiting = sum(one.num_waiting for one in versions)
        places = sum(one.rules.max_batch_size * len(one.instances) for one in versions)
        steps = sum(one.statistics.executions for one in versions)
        limits = ServingLimits(max_open=self._settings.max_open, max_num_seqs=max(1, places))
        load = EngineLoad(num_open, num_waiting, num_open - num_waiting, steps=steps)
        return ReplicaReport(
            boot=self._boot,
            model=self.name,
            state=self.state,
            is_draining=self.drain.is_begun or (self._is_open and not loaded),
            version=__version__,
            startup_s=dict(self.startup_s) or None,
            takes_tensors=True,
            tensors=tuple(_news(one) for one in versions),
            measured=EngineMeasurements(load=load, limits=limits),
        )


class _Running:
    """A request, while it runs: nothing that could go on elsewhere."""

    def give_back(self, error: PenstockError) -> None: ...


def _news(version: ServedVersion) -> TensorNews:
    done, rules = version.statistics, version.rules
    return TensorNews(
        version.name,
        version.version,
        len(version.instances),
        version.instances[0].device,
        rules.max_batch_size if rules.joins else 1,
        version.num_waiting,
        version.num_open - version.num_waiting,
        done.inferences,
        done.executions,
        done.refusals,
        rules.policy_at(rules.default_priority_level).max_queue_size,
        rules.max_queue_delay_s if rules.joins else 0.0,
        done.mean_queue_s,
    )


def _settings_in(parameters: Mapping[str, object]) -> ModelSettings | None:
    """Settings of a load call: Triton's parameter `config`, which is JSON."""
    for name in parameters:
        if name != "config":
            said = "files come from the server's disk alone" if name.startswith("file:") else "it is not known"
            raise UnsupportedParameter(f"the parameter '{shown(name)}': {said}", param=shown(name))
    if "config" not in parameters:
        return None
    try:
        return settings_of(msgspec.json.decode(str(parameters["config"])), "config")
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"config is not valid JSON: {error}", param="config") from None
    except ConfigError as error:
        raise InvalidRequest(error.message, param="config") from None


def config_of(version: ServedVersion) -> dict[str, Any]:
    """The configuration as the protocol's config call has it, with what was found out of the model's file."""
    settings, signature = version.settings, version.signature
    rules = version.rules
    found = msgspec.to_builtins(settings)
    tensors = {
        key: [{"name": one.name, "data_type": f"TYPE_{one.datatype}", "dims": list(one.dims)} for one in specs]
        for key, specs in (("input", signature.inputs), ("output", signature.outputs))
    }
    found |= {"name": version.name, "backend": "onnxruntime", "platform": "onnxruntime_onnx", **tensors}
    found["max_batch_size"] = signature.max_batch_size
    found["instance_group"] = [
        {"name": f"{version.name}_{number}", "count": 1, "kind": f"KIND_{one.device.upper()}"}
        for number, one in enumerate(version.instances)
    ]
    if found["dynamic_batching"] is None:
        del found["dynamic_batching"]
        if rules.joins and signature.max_batch_size:
            found["dynamic_batching"] = {"max_queue_delay_microseconds": 0}
    found["version_policy"] = {key: value for key, value in found["version_policy"].items() if value is not None} or {
        "latest": msgspec.to_builtins(ModelSettings().version_policy.latest) or {"num_versions": 1}
    }
    return dict(found)


async def _tell(sink: Sink, is_well: bool, **facts: object) -> None:
    body = {"status": "ok" if is_well else "unavailable", **facts}
    await json_response(sink, 200 if is_well else 503, msgspec.json.encode(body))
