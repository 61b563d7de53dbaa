"""The protocol over HTTP: /v2 in front of an application that knows /v1.

Answers of `generate_stream` are server-sent events; an error after the first comes as an event, in a 200. Errors have
the shape that Triton's clients read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec

from penstock.api import sse
from penstock.api.decoding import WireStruct, decode
from penstock.api.oip.answer import Generated, Refusal
from penstock.api.oip.infer_json import HEADER_LENGTH, read_inference, write_inference
from penstock.api.oip.request import DEFAULT_VERSION, STREAM, InferenceRequest, from_generate
from penstock.core.config import shown
from penstock.core.errors import MethodNotAllowed, NotFound, PenstockError, UnsupportedParameter
from penstock.http.exchange import Exchange
from penstock.http.message import JSON, Request, render
from penstock.http.server import App, BodyGate, OpenGate
from penstock.oip.calls import Calls
from penstock.oip.inner_exchange import Caller
from penstock.oip.tensor_calls import TensorBody, TensorCalls, header_lines, json_length

T = TypeVar("T")

logger = logging.getLogger("penstock")

_ROOT = b"/v2"
_MODELS = b"/v2/models/"
_ALL_STATISTICS = b"/v2/models/stats"
_REPOSITORY, _INDEX = b"/v2/repository/", b"/v2/repository/index"
_EXACT = {
    _ROOT: "server",
    b"/v2/": "server",
    b"/v2/health/live": "live",
    b"/v2/health/ready": "server_ready",
    _ALL_STATISTICS: "stats",
    _INDEX: "index",
}
_LONG_PATH = 256  # bytes
_ORDER = re.compile(rb"/v2/repository/models/(?P<model>.+)/(?P<call>load|unload)")
_READ, _WRITE = (b"GET", b"HEAD"), (b"POST",)
_MODEL = re.compile(
    rb"/v2/models/(?P<model>.+?)(?:/versions/(?P<version>[^/]+))?"
    rb"(?:/(?P<call>ready|infer|generate_stream|generate|config|stats))?"
)
_WRITES = ("infer", "generate", "generate_stream", "index", "load", "unload")
_EVENTS = render(
    [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
)


class Target(NamedTuple):
    """The parts of a path."""

    call: str
    model: str = ""
    version: str = ""


def is_ours(path: bytes) -> bool:
    """Whether a path is the protocol's: under /v2 there are other APIs too, such as /v2/rerank."""
    return path in (_ROOT, b"/v2/") or path.startswith((_MODELS, _REPOSITORY, b"/v2/health/"))


def target_of(request: Request) -> Target:
    """Raises NotFound, MethodNotAllowed."""
    path = request.path
    return _target_of(request.method, path) if len(path) > _LONG_PATH else _known_target_of(request.method, path)


def _target_of(method: bytes, path: bytes) -> Target:
    if path in _EXACT:
        target = Target(_EXACT[path])
    elif path.startswith(_MODELS) and (found := _MODEL.fullmatch(path)):
        model, version, call = (
            unquote((found[name] or b"").decode("latin-1")) for name in ("model", "version", "call")
        )
        target = Target(call or "model", model, version)
    elif found := _ORDER.fullmatch(path):
        target = Target(found["call"].decode(), unquote(found["model"].decode("latin-1")))
    else:
        raise NotFound(f"no such path: {shown(path.decode(errors='replace'))}")
    allowed = _WRITE if target.call in _WRITES else _READ
    if method not in allowed:
        raise MethodNotAllowed(f"{shown(path.decode(errors='replace'))} takes {allowed[0].decode()}")
    return target


_known_target_of = lru_cache(maxsize=1024)(_target_of)


class OverHttp:
    """An application with /v2 beside it, and the gate for the bodies of both."""

    def __init__(self, app: App, calls: Calls, gate: BodyGate | None = None) -> None:
        """`gate`: the application's."""
        self._app = app
        self._calls = calls
        self._gate = gate or OpenGate()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.request.path
        if not (path.startswith(_ROOT) and is_ours(path)):
            self._app(exchange)
            return
        answering = _Answering(exchange, self._calls)
        answering.task = asyncio.get_running_loop().create_task(answering.run())
        self._tasks.add(answering.task)
        answering.task.add_done_callback(self._tasks.discard)

    # -- bodies

    def body_owner(self, head: Request) -> str | None:
        if not is_ours(head.path):
            return self._gate.body_owner(head)
        if head.method != b"POST":
            return None
        caller = Caller(head.headers)
        if _ORDER.fullmatch(head.path):
            return self._calls.order_owner(caller)
        try:
            return self._calls.body_owner(caller)
        except PenstockError:
            if head.path != _INDEX:
                raise
            return self._calls.order_owner(caller)  # the index is for admins too

    def turn_away(self, exchange: Exchange, error: PenstockError) -> None:
        if not is_ours(exchange.request.path):
            self._gate.turn_away(exchange, error)
            return
        if not exchange.request.path.startswith(_REPOSITORY):
            self._calls.turn_away(Caller(exchange.request.headers, exchange.peer), error)
        _refuse(exchange, Refusal.of(error))


class _Answering:
    """One call, and the watcher of its exchange."""

    def __init__(self, exchange: Exchange, calls: Calls) -> None:
        self._exchange = exchange
        self._request = exchange.request
        self._calls = calls
        self._caller = Caller(exchange.request.headers, exchange.peer)
        self._may_write: asyncio.Event | None = None  # a client that is slow is waited for
        self.task: asyncio.Task[None]
        exchange.watcher = self

    # -- the exchange's side

    def client_gone(self) -> None:
        self.task.cancel()

    def pause(self) -> None:
        self._may_write = asyncio.Event()

    def resume(self) -> None:
        if self._may_write is not None:
            self._may_write.set()
            self._may_write = None

    # -- the call

    async def run(self) -> None:
        try:
            await self._answer(target_of(self._request))
        except Refusal as refusal:
            _refuse(self._exchange, refusal)
        except PenstockError as error:
            _refuse(self._exchange, Refusal.of(error))
        except Exception:
            logger.exception("%s %s failed", self._request.method, self._request.path)
            _refuse(self._exchange, Refusal.of(PenstockError("internal error")))

    async def _answer(self, target: Target) -> None:
        encoding = self._request.headers.get(b"content-encoding", b"identity")
        if encoding.lower() != b"identity":
            raise UnsupportedParameter("content-encoding: bodies come uncompressed", param="content-encoding")
        calls, caller, model, version = self._calls, self._caller, target.model, target.version
        body = self._request.body
        match target.call:
            case "live":
                is_live = await calls.is_live(caller)
                self._respond({"live": is_live}, 200 if is_live else 503)
            case "server_ready":
                is_ready = await calls.is_ready(caller)
                self._respond({"ready": is_ready}, 200 if is_ready else 503)
            case "server":
                self._respond(await calls.server_metadata(caller))
            case "model":
                self._respond(await calls.model_metadata(caller, model, version))
            case "ready":
                is_ready = await calls.is_model_ready(caller, model, version)
                self._respond({"name": model, "ready": is_ready}, 200 if is_ready else 503)
            case "config" | "stats" as call:
                await self._describe(calls.known_tensors_of(model), call, model, version)
            case "infer" if (tensors := calls.tensors_of(model)) is not None:
                found = await tensors.infer(caller, model, version, TensorBody(body, self._json_length()))
                self._exchange.respond(200, header_lines(found), found.data)
            case "infer":
                await self._infer(model, version)
            case "index":
                only_ready = _read_order(body).ready
                self._respond(await calls.repository.index(caller, only_ready=only_ready))
            case "load" | "unload" as call:
                order = calls.repository.load if call == "load" else calls.repository.unload
                await order(caller, model, _read_order(body).parameters)
                self._respond({})
            case "generate":
                await self._generate(await self._read(lambda: from_generate(model, version, body)))
            case _:
                await self._generate_stream(await self._read(lambda: from_generate(model, version, body)))

    async def _read(self, function: Callable[[], T]) -> T:
        return await self._calls.read(len(self._request.body), function)

    async def _describe(self, tensors: TensorCalls, call: str, model: str, version: str) -> None:
        describe = tensors.config if call == "config" else tensors.statistics
        self._respond(await describe(self._caller, model, version))

    def _json_length(self) -> int | None:
        return json_length(self._request.headers, len(self._request.body))

    async def _infer(self, model: str, version: str) -> None:
        headers, body = self._request.headers, self._request.body
        asked = await self._read(lambda: read_inference(model, version, headers, body))
        if asked.request.stream:
            raise UnsupportedParameter(f"{STREAM}: infer answers once; generate_stream streams", param=STREAM)
        inference = self._calls.inference(self._caller, asked.request)
        written, json_length = write_inference(asked, await inference.whole())
        lines = JSON + render(inference.headers.items())
        if json_length is not None:
            own = [(b"content-type", b"application/octet-stream"), (HEADER_LENGTH, b"%d" % json_length)]
            lines = render([*own, *inference.headers.items()])
        self._exchange.respond(200, lines, written)

    async def _generate(self, asked: InferenceRequest) -> None:
        if asked.stream:
            raise UnsupportedParameter(f"{STREAM}: generate answers once; generate_stream streams", param=STREAM)
        inference = self._calls.inference(self._caller, asked)
        answer = await inference.whole()
        self._exchange.respond(200, JSON + render(inference.headers.items()), _generated(asked, answer))

    async def _generate_stream(self, asked: InferenceRequest) -> None:
        """`stream: false` is one event, as Triton has it."""
        exchange = self._exchange
        inference = self._calls.inference(self._caller, asked)
        async with contextlib.aclosing(inference.pieces(streams=asked.stream is not False)) as pieces:
            async for piece in pieces:
                if not exchange.is_started:
                    exchange.start(200, _EVENTS + render(inference.headers.items()))
                exchange.write(sse.event(_generated(asked, piece)), piece.is_last)
                if not piece.is_last and self._may_write is not None:
                    await self._may_write.wait()

    def _respond(self, body: object, status: int = 200) -> None:
        self._exchange.respond(status, JSON, msgspec.json.encode(body))


class _Order(WireStruct):
    """The body of a call about the repository; there need not be one."""

    ready: bool = False
    parameters: dict[str, str | bool | int | float] = msgspec.field(default_factory=dict)


def _read_order(body: bytes) -> _Order:
    return decode(_orders, body) if body.strip() else _Order()


_orders = msgspec.json.Decoder(_Order)


def _generated(asked: InferenceRequest, piece: Generated) -> bytes:
    answer: dict[str, object] = {"id": asked.id} if asked.id else {}
    answer |= {"model_name": asked.model, "model_version": asked.version or DEFAULT_VERSION}
    answer["text_output"] = piece.texts[0]
    if piece.is_last:
        answer["finish_reason"] = piece.ends[0]
    return msgspec.json.encode(answer)


def _refuse(exchange: Exchange, refusal: Refusal) -> None:
    if exchange.is_started:
        exchange.write(sse.event(refusal.body()), is_last=True)
        return
    headers = []
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if refusal.request_id:
        headers.append((b"x-request-id", refusal.request_id.encode("latin-1")))
    exchange.respond(refusal.status, JSON + render(headers), refusal.body())
