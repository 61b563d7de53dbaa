"""Triton's model repository calls, in front of an application whose models share a device: each means an order.

A load answers when the model is loaded; an unload answers at once, and the model leaves when its requests have ended,
both as Triton has it. Models come from the operator's command line or file only, so a call brings none along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from penstock.api.model_order import LOOK_S, MODELS_PATH, FollowedOrder, ModelSeen
from penstock.api.oip.answer import Refusal, read_refusal
from penstock.api.oip.request import DEFAULT_VERSION
from penstock.core.config import shown
from penstock.core.errors import EngineFailed, PenstockError, UnsupportedParameter
from penstock.http.server import App
from penstock.oip.inner_exchange import Answer, Caller, InnerExchange, ask

T = TypeVar("T")

_STATES = {
    "loaded": "READY",
    "loading": "LOADING",
    "waking": "LOADING",
    "draining": "UNLOADING",
    "leaving": "UNLOADING",
}
_READY, _AWAY = "READY", "UNAVAILABLE"
_KNOWN = {"load": (), "unload": ("unload_dependents",)}  # no model here has dependents


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Models(msgspec.Struct):
    models: list[ModelSeen]


_model_seen_decoder = msgspec.json.Decoder(ModelSeen)
_cards_decoder = msgspec.json.Decoder(_Cards)
_models_decoder = msgspec.json.Decoder(_Models)


class OrderedModels:
    """The `RepositoryCalls` of models that orders load and unload, and the index of those that stay."""

    def __init__(self, app: App, is_ready: Callable[[Caller, str, str], Awaitable[bool]]) -> None:
        """`is_ready`: whether a model of this name and version can serve the caller. Raises Refusal, PenstockError."""
        self._app = app
        self._is_ready = is_ready

    async def index(self, caller: Caller, *, only_ready: bool) -> list[dict[str, Any]]:
        """Index entries: an admin's are the models that share a device, another caller's those that it may use."""
        shared = await ask(self._app, caller, b"GET", MODELS_PATH.encode())
        found = {}
        if shared.status == 200:
            found = {one.name: _entry(one) for one in _read(shared, _models_decoder).models}
        known = await ask(self._app, caller, b"GET", b"/v1/models")
        if known.status != 200 and not found:
            raise read_refusal(*known)
        for card in _read(known, _cards_decoder).data if known.status == 200 else ():
            if card.id not in found:
                found[card.id] = await self._entry_of(caller, card.id)
        return [entry for entry in found.values() if not only_ready or entry["state"] == _READY]

    async def _entry_of(self, caller: Caller, model: str) -> dict[str, str]:
        """Index entry of a model that takes no orders."""
        try:
            is_ready = await self._is_ready(caller, model, "")
        except (Refusal, PenstockError):
            is_ready = False
        entry = {"name": model, "version": DEFAULT_VERSION, "state": _READY if is_ready else _AWAY}
        return entry if is_ready else entry | {"reason": "no replica takes requests"}

    async def load(self, caller: Caller, model: str, parameters: Mapping[str, object]) -> None:
        """Returns when the model is loaded."""
        _check_parameters("load", parameters)
        seen = _read(await self._order(caller, b"POST", model, "/load"), _model_seen_decoder)
        order = FollowedOrder("load", seen)
        while not order.is_done(seen):
            await asyncio.sleep(LOOK_S)
            seen = _read(await self._order(caller, b"GET", model), _model_seen_decoder)

    async def unload(self, caller: Caller, model: str, parameters: Mapping[str, object]) -> None:
        _check_parameters("unload", parameters)
        await self._order(caller, b"POST", model, "/unload", b'{"drain":true}')

    async def _order(self, caller: Caller, method: bytes, model: str, verb: str = "", body: bytes = b"") -> Answer:
        target = f"{MODELS_PATH}/{quote(model, safe='')}{verb}".encode()
        exchange = InnerExchange(caller.request(method, target, body), caller.peer)
        try:
            self._app(exchange)
            answer = await exchange.whole()
        finally:
            exchange.lost()
        if answer.status in (200, 202):
            return answer
        refusal = read_refusal(*answer)
        if refusal.status == 404 and refusal.code == "not_found":  # the path, not the model
            raise UnsupportedParameter(
                "models are neither loaded nor unloaded here: this server has one, or its admin API has another port"
            )
        raise refusal


def _entry(model: ModelSeen) -> dict[str, str]:
    state = _STATES.get(model.state, _AWAY)
    entry = {"name": model.name, "version": DEFAULT_VERSION, "state": state}
    return entry if state == _READY else entry | {"reason": model.failure or model.refusal or model.state}


def _check_parameters(verb: str, parameters: Mapping[str, object]) -> None:
    for name in parameters:
        if name not in _KNOWN[verb]:
            said = f"{shown(name)}: models and their settings come from the operator's file"
            raise UnsupportedParameter(said, param="parameters")


def _read(answer: Answer, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(answer.body)
    except msgspec.DecodeError:
        raise EngineFailed("the answer about models cannot be read") from None
