"""Calls about models that take tensors, through a gateway: each is a request of the application in the caller's name,
so keys, limits, routing and failover are those of all requests. A replica answers it here, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.api.oip.answer import read_refusal
from penstock.api.oip.tensor_call import CALL_BYTES, TENSORS_PATH, Packed, TensorCall, open_call, pack_call
from penstock.core.config import shown
from penstock.core.errors import BodyTooLarge, EngineFailed
from penstock.http.limits import ClientLimits
from penstock.http.server import App
from penstock.oip.inner_exchange import Caller, InnerExchange
from penstock.oip.tensor_calls import TensorBody, TensorCalls

__all__ = ["TensorRelay", "answer_call", "open_call", "pack"]

_PATH = TENSORS_PATH.encode()
_SHOWN = (b"x-request-id", b"server-timing")
_OWN = b"x-penstock-"


class _Length(msgspec.Struct):
    json_length: int | None = None


_length = msgspec.json.Decoder(_Length)


class TensorRelay:
    """The `TensorCalls` of a gateway."""

    def __init__(
        self,
        app: App,
        takes_tensors: Callable[[str], bool],
        can_serve: Callable[[str], bool],
        *,
        max_body_bytes: int = ClientLimits().max_body_bytes,
    ) -> None:
        """`takes_tensors`: whether a model of this name does; `can_serve`: now. Both raise ModelNotFound."""
        self._app = app
        self._takes_tensors = takes_tensors
        self._can_serve = can_serve
        self._max_body_bytes = max_body_bytes

    def owns(self, model: str) -> bool:
        return self._takes_tensors(model)

    async def infer(self, caller: Caller, model: str, version: str, body: TensorBody) -> TensorBody:
        call = TensorCall(model=model, version=version, json_length=body.json_length)
        if len(body.data) > self._max_body_bytes:
            raise BodyTooLarge(f"this request is larger than the limit of {self._max_body_bytes} bytes")
        return await self._ask(caller, call, body.data)

    async def is_ready(self, caller: Caller, model: str, version: str) -> bool:
        """Its metadata are asked for: so a version that no replica has is none."""
        if not self._can_serve(model):
            return False
        await self.metadata(caller, model, version)
        return True

    async def metadata(self, caller: Caller, model: str, version: str) -> dict[str, Any]:
        found = await self._described(caller, TensorCall(model=model, version=version, call="metadata"))
        return found | {"name": model}

    async def config(self, caller: Caller, model: str, version: str) -> dict[str, Any]:
        found = await self._described(caller, TensorCall(model=model, version=version, call="config"))
        return found | {"name": model}

    async def statistics(self, caller: Caller, model: str, version: str) -> dict[str, Any]:
        """Statistics of one replica."""
        return await self._described(caller, TensorCall(model=model, version=version, call="statistics"))

    async def _described(self, caller: Caller, call: TensorCall) -> dict[str, Any]:
        found = await self._ask(caller, call, b"")
        try:
            return msgspec.json.decode(found.data, type=dict[str, Any])
        except msgspec.DecodeError:
            raise EngineFailed("the replica's answer is not JSON") from None

    async def _ask(self, caller: Caller, call: TensorCall, body: bytes) -> TensorBody:
        exchange = InnerExchange(caller.request(b"POST", _PATH, pack_call(call, body)), caller.peer)
        try:
            self._app(exchange)
            status, headers = await exchange.head()
            answer = await exchange.whole()
            if status != 200:
                raise read_refusal(*answer)
            told = {name: headers[name] for name in headers if name in _SHOWN or name.startswith(_OWN)}
            return _unpack(answer.body)._replace(headers=told)
        finally:
            exchange.lost()


async def answer_call(calls: TensorCalls, caller: Caller, packed: Packed) -> TensorBody:
    """The answer to a call that a gateway has sent."""
    (call, body), model, version = packed, packed.call.model, packed.call.version
    if call.call == "infer":
        return await calls.infer(caller, model, version, TensorBody(body, call.json_length))
    describe = {"metadata": calls.metadata, "config": calls.config, "statistics": calls.statistics}[call.call]
    return TensorBody(msgspec.json.encode(await describe(caller, model, version)))


def pack(body: TensorBody) -> bytes:
    """An answer, behind a line that says where its JSON ends."""
    return b"%b\n%b" % (msgspec.json.encode(_Length(body.json_length)), body.data)


def _unpack(data: bytes) -> TensorBody:
    end = data.find(b"\n", 0, CALL_BYTES)
    try:
        return TensorBody(data[end + 1 :], _length.decode(data[: max(0, end)]).json_length)
    except msgspec.DecodeError:
        raise EngineFailed(f"the replica's answer is not one with tensors: {shown(repr(data[:20]))}") from None
