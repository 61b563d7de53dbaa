"""The protocol's calls, whatever they come over: questions about the server and its models, and inference.

Each is one or two requests to the application in the caller's name. A refusal of the application is raised as a
`Refusal`, with its status and words.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar
from urllib.parse import quote

from penstock.api.model_order import MODELS_PATH
from penstock.api.oip.answer import CompletionReader, Generated, Refusal, read_refusal, read_whole
from penstock.api.oip.metadata import model_metadata, server_metadata
from penstock.api.oip.request import InferenceRequest, model_name
from penstock.core.config import shown
from penstock.core.errors import BodyTooLarge, NotFound, PenstockError
from penstock.http.limits import ClientLimits
from penstock.http.message import Request
from penstock.http.server import App, BodyGate, OpenGate
from penstock.oip.inner_exchange import Caller, InnerExchange, ask
from penstock.oip.ordered_models import OrderedModels
from penstock.oip.tensor_calls import RepositoryCalls, TensorCalls

COMPLETIONS = b"/v1/completions"
_SHOWN = (b"x-request-id", b"server-timing")
_OWN = b"x-penstock-"
_LONG_BYTES = 128 << 10

T = TypeVar("T")

CanServe = Callable[[str], bool]  # a model of this name, now


class Calls:
    def __init__(
        self,
        app: App,
        gate: BodyGate | None = None,
        can_serve: CanServe | None = None,
        *,
        max_body_bytes: int = ClientLimits().max_body_bytes,
        tensors: TensorCalls | None = None,
        repository: RepositoryCalls | None = None,
    ) -> None:
        """`gate`: the application's, for bodies; `can_serve`: None: any of its models, if the application is ready;
        `tensors`: models that take tensors, if there may be any; `repository`: None: its models come and go
        by orders, if they do."""
        self._app = app
        self._gate = gate or OpenGate()
        self._can_serve = can_serve
        self.max_body_bytes = max_body_bytes
        self._tensors = tensors
        self.repository = repository or OrderedModels(app, self.is_model_ready)

    def tensors_of(self, model: str) -> TensorCalls | None:
        """Calls of a model that takes tensors; None: it makes text."""
        return self._tensors if self._tensors is not None and self._tensors.owns(model) else None

    def known_tensors_of(self, model: str) -> TensorCalls:
        """Raises NotFound."""
        tensors = self.tensors_of(model)
        if tensors is None:
            raise NotFound(f"'{shown(model)}' is no model that takes tensors", param="model")
        return tensors

    # -- bodies

    def body_owner(self, caller: Caller) -> str | None:
        """The owner of the body of an inference that is about to arrive. Raises where it is not wanted."""
        return self._gate.body_owner(caller.request(b"POST", COMPLETIONS))

    def order_owner(self, caller: Caller) -> str | None:
        """The same of a body with an order to load or unload a model: an admin's."""
        return self._gate.body_owner(caller.request(b"POST", MODELS_PATH.encode()))

    def turn_away(self, caller: Caller, error: PenstockError) -> None:
        """Lets the application know, and count, that a body was not read."""
        exchange = InnerExchange(Request(b"POST", COMPLETIONS, dict(caller.headers), b""), caller.peer)
        self._gate.turn_away(exchange, error)
        exchange.lost()

    @staticmethod
    async def read(size_bytes: int, function: Callable[[], T]) -> T:
        """Runs what takes as long as a body is large: for a long one in a thread, while other calls go on."""
        return function() if size_bytes <= _LONG_BYTES else await asyncio.to_thread(function)

    # -- questions

    async def is_live(self, caller: Caller) -> bool:
        return (await ask(self._app, caller, b"GET", b"/health")).status == 200

    async def is_ready(self, caller: Caller) -> bool:
        return (await ask(self._app, caller, b"GET", b"/ready")).status == 200

    async def is_model_ready(self, caller: Caller, model: str, version: str) -> bool:
        """Raises Refusal: for a model that is none, or not the caller's."""
        if (tensors := self.tensors_of(model)) is not None:
            try:
                return await tensors.is_ready(caller, model, version)
            except PenstockError as error:
                raise Refusal.of(error) from None
        try:
            await self._check_model(caller, model, version)
        except Refusal as refusal:
            if refusal.status == 503:
                return False
            raise
        if self._can_serve is not None:
            return self._can_serve(model_name(model, version))
        return await self.is_ready(caller)

    async def server_metadata(self, caller: Caller) -> dict[str, Any]:
        """Metadata of the server, for callers that may ask which models there are."""
        await self._get(caller, b"/v1/models")
        return server_metadata(has_tensors=self._tensors is not None)

    async def model_metadata(self, caller: Caller, model: str, version: str) -> dict[str, Any]:
        if (tensors := self.tensors_of(model)) is not None:
            return await tensors.metadata(caller, model, version)
        await self._check_model(caller, model, version)
        return model_metadata(model, version)

    def inference(self, caller: Caller, request: InferenceRequest) -> Inference:
        return Inference(self._app, caller, request, self.max_body_bytes)

    async def _check_model(self, caller: Caller, model: str, version: str) -> None:
        await self._get(caller, b"/v1/models/" + quote(model_name(model, version)).encode())

    async def _get(self, caller: Caller, target: bytes) -> None:
        answer = await ask(self._app, caller, b"GET", target)
        if answer.status != 200:
            raise read_refusal(*answer)


class Inference:
    """One inference, on its way from `pieces`. It is given up with the iterator."""

    def __init__(self, app: App, caller: Caller, request: InferenceRequest, max_body_bytes: int) -> None:
        self._app = app
        self._caller = caller
        self._request = request
        self._max_body_bytes = max_body_bytes
        self.headers: dict[bytes, bytes] = {}  # of the answer, that a client may want to see; once it has begun

    async def whole(self) -> Generated:
        async with contextlib.aclosing(self.pieces(streams=False)) as pieces:
            return await anext(pieces)

    async def pieces(self, *, streams: bool) -> AsyncGenerator[Generated]:
        """The answer as it comes, and at last its end; or all of it at once."""
        size_bytes = sum(map(len, self._request.texts))
        body = await Calls.read(size_bytes, lambda: self._request.completion(streams=streams))
        if len(body) > self._max_body_bytes:
            raise BodyTooLarge(f"as JSON this request is larger than the limit of {self._max_body_bytes} bytes")
        exchange = InnerExchange(self._caller.request(b"POST", COMPLETIONS, body), self._caller.peer)
        try:
            self._app(exchange)
            status, headers = await exchange.head()
            if status != 200:
                raise read_refusal(*await exchange.whole())
            self.headers = {name: headers[name] for name in headers if name in _SHOWN or name.startswith(_OWN)}
            if not streams:
                yield read_whole((await exchange.whole()).body, len(self._request.texts))
                return
            reader = CompletionReader()
            async for data in exchange.parts():
                if text := reader.read(data):
                    yield Generated([text], [""], is_last=False)
            yield Generated([""], [reader.end()])
        finally:
            exchange.lost()
