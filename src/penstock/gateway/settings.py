"""What an operator may set for a gateway: one YAML file.

host: 127.0.0.1
port: 8000
models:
  smollm2:
    replicas: [http://127.0.0.1:9001, http://127.0.0.1:9002]
    aliases: [default]
  gpt-4o-mini:
    replicas: [https://api.openai.com]
    key_env: OPENAI_API_KEY
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.settings import setting
from penstock.gateway.http.upstream import Upstream
from penstock.gateway.replicas import Replica
from penstock.router.routes import PoolShare, Route, RouteTable

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ModelSettings:
    replicas: list[str] = field(default_factory=list)  # URLs of penstock replicas, or of OpenAI-compatible servers
    aliases: list[str] = field(default_factory=list)
    key_env: str | None = None  # the environment variable with the key that the servers want
    secret_env: str | None = None  # the one with the replicas' gateway_secret


@dataclass(frozen=True)
class GatewaySettings:
    host: str = setting("127.0.0.1", "address to listen on")
    port: Annotated[int, Meta(ge=0, le=65535)] = setting(8000, "port to listen on; 0 picks a free one")
    store: str | None = setting(None, "where tenants, keys and usage are: sqlite:///path or postgresql://…")
    limiter: str | None = setting(
        None, "who counts: auto, all gateways of this host and store together; redis://…, those of all hosts"
    )
    without_limiter: Literal["closed", "open"] = setting(
        "closed", "when Redis does not answer: refuse, or let everybody in"
    )
    allow_anonymous: bool = setting(False, "listen beyond loopback though there are no tenants: anybody may use it")
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    def pools(self) -> dict[str, ModelSettings]:
        if not self.models:
            raise ConfigError("the gateway has no models; name some under `models`", param="models")
        return {name: build(ModelSettings, values, where=f"models.{name}.") for name, values in self.models.items()}


def routes_of(pools: dict[str, ModelSettings]) -> RouteTable:
    return RouteTable(Route(name, (PoolShare(name),), aliases=tuple(pool.aliases)) for name, pool in pools.items())


def replicas_of(pools: dict[str, ModelSettings]) -> list[Replica]:
    found = []
    for name, pool in pools.items():
        if not pool.replicas:
            raise ConfigError(f"model '{name}' has no replicas", param=f"models.{name}.replicas")
        key, secret = _from_environment(pool.key_env), _from_environment(pool.secret_env)
        found += [
            Replica(url, model=name, upstream=Upstream.from_url(url), key=key, secret=secret) for url in pool.replicas
        ]
    return found


def _from_environment(variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"the environment has no {variable}")
    return value
