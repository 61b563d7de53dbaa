"""Requests of the gateway's own to models that it serves: for embeddings, a judge's word, or scores of an answer.

They take what is left, as copies do: a pool where somebody waits, or whose replicas have half of what they can take,
is not asked. Nobody is charged. Their prompts are cached under a name that is no tenant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec

from penstock.api.relay import NAMESPACE_HEADER
from penstock.core.errors import ModelNotFound
from penstock.gateway.proxy.direct_request import ask
from penstock.gateway.proxy.shadow import Shadows
from penstock.gateway.replicas.replica import Replica
from penstock.http.message import render
from penstock.router.routes import RouteTable, Target

_TIMEOUT_S = 60.0
_NAMESPACE = render([(NAMESPACE_HEADER.encode(), b"~rollouts")])


class ModelAsker:
    def __init__(self, replicas: Mapping[str, Replica], shadows: Shadows, random: Random) -> None:
        self.routes = RouteTable(())
        self._replicas = replicas
        self._shadows = shadows
        self._random = random

    async def ask(self, model: str, path: bytes, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer of a model by its name, alias or version. None: there is none now."""
        try:
            route = self.routes.find(model)
        except ModelNotFound:
            return None
        target = route.target(self._random.random()) if route.rules is None else None
        return await self.ask_target(target, path, fields) if target is not None else None

    async def ask_target(self, target: Target, path: bytes, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        seen = self._shadows.free_replica(target)  # a pipeline has none
        if seen is None:
            return None
        replica = self._replicas[seen.id]
        body = msgspec.json.encode({"model": target.adapter or replica.served_as, **fields})
        found = await ask(replica, path, body, timeout_s=_TIMEOUT_S, headers=_NAMESPACE if replica.relays else b"")
        if found is None or found[0] != 200:
            return None
        try:
            document = msgspec.json.decode(found[1])
        except (ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None
