"""Settings of a gateway: one YAML file.

host: 127.0.0.1
port: 8000
models:
  smollm2:
    replicas: [http://127.0.0.1:9001, http://127.0.0.1:9002]
    aliases: [default]
  gpt-4o-mini:
    replicas: [https://api.openai.com]
    key_env: OPENAI_API_KEY
    fallback: [smollm2]
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.admission.settings import CLASS_NAMES, AdmissionSettings
from penstock.core.config import build, within
from penstock.core.errors import ConfigError
from penstock.core.settings import Role, TelemetrySettings, setting
from penstock.core.slo import Seconds, Slo
from penstock.dialects.handover import BOOTSTRAP_PORT
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.endpoint_picker.settings import EndpointPickerSettings
from penstock.gateway.proxy.cache_salt import KEY_BYTES, CacheSalts, key_in
from penstock.gateway.proxy.stranded import WAIT_S
from penstock.gateway.records.request_log import LogSettings
from penstock.gateway.replicas.kv_sources import KvEventSettings
from penstock.gateway.responses.settings import ResponseSettings
from penstock.gateway.settings.routes import adapter_owner, routed_versions, rule_set, versions_of
from penstock.health.settings import HealthSettings, Period
from penstock.http.kubernetes_api import ClusterSettings
from penstock.http.tls import ServerTls, client_context
from penstock.router.legs import Split
from penstock.router.router import Router
from penstock.router.routes import Failure, Fallback, PoolShare, Route, RouteTable
from penstock.router.strategies import RoutingSettings
from penstock.tenancy.prices import Price
from penstock.watch.settings import WatchSettings
from penstock.websocket.settings import WebSocketSettings

log = logging.getLogger(__name__)

MIN_BODY_BYTES = 1 << 10  # that a limit of bodies may be
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ModelSettings:
    """A model has replicas, or versions that have them, or rules that lead to other models."""

    # URLs of penstock replicas, or of OpenAI-compatible servers; or url, role, bootstrap_port, kv_layout of one
    replicas: Sequence[str | dict[str, Any]] = field(default_factory=list)
    dns: list[str] = field(default_factory=list)  # names that are looked up: http://NAME:PORT, srv+http://NAME
    kubernetes: list[dict[str, Any]] = field(default_factory=list)  # pods: selector, and namespace, port, dialect
    served_as: str | None = None  # the name that the replicas know it by; auto: the one it has here
    versions: dict[str, Any] = field(default_factory=dict)  # each with a weight, replicas, and what is not as above
    rules: list[dict[str, Any]] = field(default_factory=list)  # the first that fires says where to
    default: str | None = None  # where to when none fires
    dry_run: bool = False  # all go to the default; it is shown where they would have gone
    aliases: list[str] = field(default_factory=list)
    adapters: dict[str, str | None] = field(default_factory=dict)  # LoRA: name, and the replicas' path to load it from
    key_env: str | None = None  # the environment variable with the key that the servers want
    secret_env: str | None = None  # the one with the replicas' gateway_secret
    ca_file: str | None = None  # PEM file of the CAs that https:// replicas are trusted by; auto: the system's
    server_name: str | None = None  # what their certificates must be good for, as pods'; auto: their address
    client_cert: str | None = None  # PEM file of the certificate that such replicas are shown, if they ask
    client_key: str | None = None  # and of its private key; auto: in the same file
    zone: str = ""  # the replicas' failure domain: what loses one goes on in another; empty: not known
    fallback: list[str] = field(default_factory=list)  # models to go on to, in this order, when this one cannot
    fallback_on: list[Literal["error", "slow", "context"]] = field(default_factory=lambda: ["error", "slow", "context"])
    forward_fields: list[str] = field(default_factory=list)  # of requests, that other servers may be sent besides
    stream_usage: bool = True  # ask other servers for the usage of streams; false: they refuse stream_options
    dialect: str = "auto"  # of servers that are not penstock's: auto, or one of docs/dialects.md
    send_priority: bool = False  # tell servers that are not penstock's a tenant's class: they must schedule by it
    role: Role | None = None  # of vLLM and SGLang servers that are started to share requests; none: they are not
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] = BOOTSTRAP_PORT  # of SGLang's prefill servers
    kv_layout: str | None = None  # of such servers: alike where KV can be handed over; auto: all of this engine
    kv_events: KvEventSettings | None = None  # where vLLM, SGLang or TensorRT-LLM servers publish their KV events
    routing: RoutingSettings | None = None  # auto: the gateway's
    split: Split = "auto"  # another replica computes a prompt, or hands its KV over: if it gains, always, or never
    price: Price = field(default_factory=Price)  # per million tokens: input, output, cached; and per replica_hour
    slo: dict[str, Any] = field(default_factory=dict)  # objectives that are not the gateway's
    slow_after_s: Seconds | None = None  # time to the first byte after which the next model is tried; none: never
    hold_s: Seconds | None = None  # how long requests wait where no replica is ready; none: they are refused at once
    probe_every_s: Period | None = (
        None  # of servers without reports; auto: health's, with a key 60; 0: never, once `dialect` is known
    )
    deep_probe_every_s: Period | None = None  # auto: of penstock replicas health's, of others never

    @property
    def urls(self) -> list[str]:
        """The addresses in `replicas`."""
        return [url for url, _ in self.entries()]

    def entries(self) -> list[tuple[str, ModelSettings]]:
        """Address and settings of each of `replicas`: the pool's, with its own in their place. Raises ConfigError."""
        return [_entry(one, self) for one in self.replicas]


@dataclass(frozen=True)
class ReplicaEntry:
    url: str
    role: Role | None = None
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    kv_layout: str | None = None


def _entry(one: str | dict[str, Any], pool: ModelSettings) -> tuple[str, ModelSettings]:
    if isinstance(one, str):
        return one, pool
    entry = build(ReplicaEntry, one, where="replicas.")
    own = {name: value for name, value in asdict(entry).items() if name != "url" and value is not None}
    return entry.url, replace(pool, **own)


@dataclass(frozen=True)
class DnsSettings:
    every_s: Seconds = setting(5.0, "how often the names of `models` are looked up")
    timeout_s: Seconds = setting(3.0, "how long a look may take")
    nameservers: list[str] = setting([], "addresses of the DNS servers; none: the system's")
    port: Annotated[int, Meta(ge=1, le=65535)] = setting(53, "port of those servers")


@dataclass(frozen=True)
class GatewaySettings:
    host: str = setting("127.0.0.1", "address to listen on")
    port: Annotated[int, Meta(ge=0, le=65535)] = setting(8000, "port to listen on; 0 picks a free one")
    grpc_port: Annotated[int, Meta(ge=0, le=65535)] | None = setting(
        None,
        "port of the Open Inference Protocol over gRPC, on the same host and with the same certificate "
        "(penstock[grpc]); 0 picks a free one; none: HTTP alone, which has it under /v2",
    )
    store: str | None = setting(None, "where tenants, keys and usage are: sqlite:///path or postgresql://…")
    limiter: str | None = setting(
        None,
        "who counts: redis://…, gateways of all hosts together; auto: as PENSTOCK_LIMITER says, or without it those of "
        "this host and store",
    )
    without_limiter: Literal["closed", "open"] = setting(
        "closed", "when Redis does not answer: refuse, or let everybody in"
    )
    allow_anonymous: bool = setting(False, "listen beyond loopback though there are no tenants: anybody may use it")
    allowed_hosts: list[str] = setting(
        [],
        "before there are tenants: names that clients may call it by, and whose web pages may use it, as of a proxy in "
        "front of it; none: on loopback an address or localhost, elsewhere any",
    )
    allowed_origins: list[str] = setting(
        [], "origins (https://chat.example) whose web pages may use the API from a browser (CORS); *: all; none: none"
    )
    admin_host: str = setting("127.0.0.1", "address of the admin port")
    admin_port: Annotated[int, Meta(ge=0, le=65535)] | None = setting(
        None, "port of the admin API and /metrics; 0 picks a free one; not set: on loopback the same, else none"
    )
    cache_salt_env: str | None = setting(
        None, "the environment variable with the key of salts for other servers' caches; auto: a file in PENSTOCK_HOME"
    )
    tls_cert: str | None = setting(
        None, "PEM file of the certificate and those above it; read again when it changes; none: plain HTTP"
    )
    tls_key: str | None = setting(None, "PEM file of its private key; auto: in the certificate's file")
    admin_tls: bool | None = setting(
        None, "the admin port with the same certificate; auto: if there is one and admin_host is not loopback"
    )
    max_body_bytes: Annotated[int, Meta(ge=MIN_BODY_BYTES)] = setting(
        8 << 20, "largest request body; images in it are a third larger than their files; replicas have their own"
    )
    max_arriving_bytes: Annotated[int, Meta(ge=16 << 20)] = setting(
        1 << 30, "what bodies of requests may take together while they arrive; one tenant's at most half of it"
    )
    worker_timeout_s: Annotated[float, Meta(ge=3)] | None = setting(
        30.0, "with --processes: a worker that sends no heartbeat for so long is killed, and started again; none: never"
    )
    request_log: bool = setting(True, "a line in the log for each request")
    route_headers: bool = setting(
        True,
        "x-penstock-replica and x-penstock-route in answers: where from, and why, the latter for tenants that may know",
    )
    decision_log: bool = setting(True, "keep every choice of a replica, with scores and outcome, under PENSTOCK_HOME")
    decision_log_bytes: Annotated[int, Meta(ge=1 << 20)] = setting(256 << 20, "the most that the decision log takes")
    logs: LogSettings = field(default_factory=LogSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    slo: Slo = field(default_factory=Slo)
    max_wait_s: dict[Literal["interactive", "standard", "batch"], Seconds] = setting(
        {}, "how long requests of a class may wait for a place; auto: by the model's slo.ttft_s, batch 300"
    )
    resume_wait_s: Seconds = setting(
        WAIT_S, "how long a stream whose replicas were lost waits for one to come back before it ends with an error"
    )
    dns: DnsSettings = field(default_factory=DnsSettings)
    kubernetes: ClusterSettings = field(default_factory=ClusterSettings)
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    websocket: WebSocketSettings = field(default_factory=WebSocketSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    endpoint_picker: EndpointPickerSettings = field(default_factory=EndpointPickerSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    pipelines: list[str] = setting(
        [], "files of pipelines, beside this one: steps behind one model's name each; see docs/pipelines.md"
    )
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    def pools(self) -> dict[str, ModelSettings]:
        return {name: build(ModelSettings, values, where=f"models.{name}.") for name, values in self.models.items()}

    @property
    def limiter_url(self) -> str | None:
        """Where Redis is. It may hold a password, and so the environment may say it instead of the file."""
        return self.limiter or os.environ.get("PENSTOCK_LIMITER") or None

    def tls(self) -> ServerTls | None:
        """The certificate of the public port, and of the admin port if `has_admin_tls`; raises if unusable."""
        if self.tls_cert is None:
            if self.tls_key is not None or self.admin_tls:
                raise ConfigError("TLS needs a certificate: tls_cert", param="tls_cert")
            return None
        return ServerTls(self.tls_cert, self.tls_key)

    @property
    def has_admin_tls(self) -> bool:
        return (
            self.tls_cert is not None and self.admin_host not in LOOPBACK if self.admin_tls is None else self.admin_tls
        )


_OF_THE_MODEL = (
    "adapters",
    "aliases",
    "fallback",
    "fallback_on",
    "slow_after_s",
    "versions",
    "rules",
    "default",
    "dry_run",
)


def pools_of(models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
    """Every version with replicas of its own is a pool, `model@version`: the model's settings, with the version's in
    their place."""
    found, owners = {}, owners_of(models)
    for name, model in models.items():
        if model.rules:
            continue
        plain = replace(model, versions={}, served_as=model.served_as or name)
        versions = versions_of(name, model.versions)
        for version in routed_versions(name, versions, owners):
            if not version.pool:
                continue
            where, own = f"models.{name}.versions.{version.name}.", versions[version.name].own
            for key in own.keys() & _OF_THE_MODEL:
                raise ConfigError(f"'{key}' is a setting of '{name}', not of one version", param=f"{where}{key}")
            built = build(ModelSettings, own, where=where)
            found[version.pool] = replace(plain, **{key: getattr(built, key) for key in own})
        if not model.versions:
            found[name] = plain
        elif model.replicas:
            raise ConfigError(f"'{name}' has versions, and replicas that are of none", param=f"models.{name}.replicas")
    return found


def owners_of(models: Mapping[str, ModelSettings]) -> dict[str, str]:
    """The model of each adapter that is configured."""
    return {adapter: name for name, model in models.items() for adapter in model.adapters}


def routes_of(models: dict[str, ModelSettings]) -> RouteTable:
    routes, owners = [], owners_of(models)
    for name, model in models.items():
        with within(f"models.{name}."):
            routes.append(_route(name, model, owners))
    for name, model in models.items():
        for adapter in model.adapters:
            if any(adapter == route.name for route in routes):
                raise ConfigError(f"two models or adapters are called '{adapter}'", param=f"models.{name}.adapters")
            routes.append(Route(adapter, adapter_of=name))
    with within("models."):
        return RouteTable(routes)


def _route(name: str, model: ModelSettings, owners: Mapping[str, str]) -> Route:
    after = frozenset(map(Failure, model.fallback_on))
    rules = rule_set(name, model.rules, model.default, dry_run=model.dry_run) if model.rules else None
    if rules is not None and (model.replicas or model.versions or model.fallback):
        raise ConfigError(f"'{name}' has rules: replicas and fallbacks are for the models they lead to", param="rules")
    versions = routed_versions(name, versions_of(name, model.versions), owners)
    return Route(
        name,
        () if versions or rules is not None else (PoolShare(name),),
        versions=versions,
        aliases=tuple(model.aliases),
        fallbacks=tuple(Fallback(other, after) for other in model.fallback),
        slow_after_s=model.slow_after_s,
        rules=rules,
        adapter_of=adapter_owner(name, versions),
        is_pipeline=any(version.pipeline for version in versions),
    )


def router_of(settings: GatewaySettings, models: dict[str, ModelSettings]) -> Router:
    own = {name: pool.routing for name, pool in pools_of(models).items() if pool.routing is not None}
    return Router.from_settings(settings.routing, own, splits_of(pools_of(models)))


def splits_of(pools: dict[str, ModelSettings]) -> dict[str, Split]:
    return {name: pool.split for name, pool in pools.items()}


def admission_of(settings: GatewaySettings) -> AdmissionSettings:
    own = {CLASS_NAMES[name]: wait_s for name, wait_s in settings.max_wait_s.items()}
    rules = AdmissionSettings().classes
    return AdmissionSettings(
        {one: replace(rules[one], max_wait_s=own.get(one, rules[one].max_wait_s)) for one in rules}
    )


def salts_of(settings: GatewaySettings, home: Path) -> CacheSalts:
    """Salts of the configured key, or of the one that all gateways with this `home` share."""
    if (key := from_environment(settings.cache_salt_env, "cache_salt_env")) is not None:
        return CacheSalts(key.encode())
    try:
        return CacheSalts(key_in(home / "cache_salt.key"))
    except OSError as error:
        log.warning(
            "the key of cache salts cannot be kept (%s): other servers' caches are cold for this gateway", error
        )
        return CacheSalts(os.urandom(KEY_BYTES))


def tls_of(name: str, pool: ModelSettings) -> ssl.SSLContext | None:
    """TLS of the connections to a pool's replicas; None: nothing of its own is set, so the system's CAs decide."""
    own = {"ca_file": pool.ca_file, "client_cert": pool.client_cert, "client_key": pool.client_key}
    for key, value in (own | {"server_name": pool.server_name}).items():
        if value is not None and pool.replicas and not any(url.startswith("https://") for url in pool.urls):
            raise ConfigError(f"'{name}' has no replica with an https:// address", param=key)
    if pool.client_key is not None and pool.client_cert is None:
        raise ConfigError("a client_key needs its client_cert", param="client_key")
    return client_context(*own.values()) if any(own.values()) else None


def from_environment(variable: str | None, param: str) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"the environment has no {variable}", param=param)
    return value
