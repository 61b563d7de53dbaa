"""Settings of the fleet controller: one YAML file.

pools:
  smollm2:
    model: smollm2
    min: 1
    max: 4
    slo: {ttft_s: 0.5, tpot_s: 0.1}
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.core.config import build, within
from penstock.core.cores import usable_cores
from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings, Role, ServerSettings, Settings, setting
from penstock.core.slo import Seconds, Slo
from penstock.fleet.drivers.kubernetes_settings import KubernetesSettings
from penstock.fleet.drivers.ray_settings import RaySettings
from penstock.http.tls import client_context
from penstock.router.routes import BASE, pool_of, version_of

Number = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Signal = Literal[
    "waiting",
    "wait_s",
    "ttft_s",
    "tpot_s",
    "latency_s",
    "kv_usage",
    "memory_headroom",
    "active_sequences",
    "tokens_per_s",
    "gpu_utilisation",
]


@dataclass(frozen=True)
class Schedule:
    """Bounds for some hours of the week, for people who know their peaks."""

    days: list[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]] = setting([], "none: every day")
    start: str = setting("00:00", "hour and minute in `timezone`")
    end: str = setting("24:00", "past midnight if it is before `start`")
    min: Number | None = setting(None, "active replicas at least, in these hours")
    max: Number | None = setting(None, "active replicas at most, in these hours")


@dataclass(frozen=True)
class SpotSettings:
    share: Share = setting(0.0, "largest share of a pool's replicas on spot capacity; `min` stays on demand")
    price_per_hour: Amount = setting(0.0, "of a replica on spot capacity")
    retry_s: Seconds = setting(300.0, "how long spot capacity is not asked for again after it was refused")


@dataclass(frozen=True)
class PoolSettings:
    """The replicas of one model version in one shape."""

    model: str = setting(
        "", "name, directory or file of the model, as for `penstock serve`; auto: the pool's name, without its version"
    )
    role: Role = setting(
        "both",
        "prefill: its replicas compute prompts for those of another pool; decode: they answer, and compute none for "
        "others. KV blocks go between pools of one model, each of which is scaled by itself",
    )
    serves: str | None = setting(
        None, "the pool whose model its replicas serve beside that one's, as `role: prefill` needs; auto: itself"
    )
    tensors: bool = setting(False, "its model takes tensors: gateways know it before a replica is there to say so")
    engine: EngineSettings = field(default_factory=EngineSettings)
    server: dict[str, Any] = setting({}, "settings of each replica's server, as for `penstock engine`")
    slo: dict[str, Any] = setting({}, "objectives that are not the fleet's")
    min: Number = setting(1, "active replicas at least; 0: scale to zero, requests are held meanwhile")
    max: Annotated[int, Meta(ge=1)] = setting(4, "replicas at most, those that are not active too")
    standby: Number | None = setting(None, "loaded replicas without traffic; auto: planned")
    parked: Number | None = setting(None, "replicas with their weights in host memory; auto: planned")
    surge: Annotated[float, Meta(ge=1)] = setting(
        1.0, "a declared surge: demand may become so many times as large at once"
    )
    idle_s: Seconds = setting(600.0, "with `min: 0`: how long nothing is asked before the last replica goes")
    hold_s: Seconds = setting(120.0, "how long requests are held at most while no replica is active")
    up_cooldown_s: Amount = setting(60.0, "between two steps up; none for a queue that already breaks the SLO")
    down_cooldown_s: Amount = setting(300.0, "how long after a step up no replica goes")
    scale_on: dict[Signal, float] = setting({}, "plain thresholds, instead of the prediction: one replica more above")
    predict: bool = setting(True, "start capacity ahead of the demand that is expected by time of week and trend")
    price_per_hour: Amount = setting(0.0, "of a replica on demand")
    parked_price_per_hour: Amount | None = setting(None, "of a parked replica; auto: nothing, its device is free")
    max_spend_per_hour: Amount | None = setting(None, "no replica is started beyond it")
    zones: list[str] = setting([], "failure domains to spread over; none: one")
    spot: SpotSettings = field(default_factory=SpotSettings)
    schedules: list[Schedule] = field(default_factory=list)
    timezone: str = setting("UTC", "of `schedules`, as in the tz database")
    start_timeout_s: Seconds = setting(600.0, "a start that takes longer has failed")
    drain_timeout_s: Seconds = setting(600.0, "how long streams that cannot move may go on at a replica that goes")
    gpus: Number = setting(0, "GPUs of each replica; 0: it runs on a CPU, or takes the machine's only one")
    advisory: bool = setting(
        False, "decide, record and export how many replicas are wanted, and start and stop none; auto: the fleet's"
    )
    kubernetes: dict[str, Any] = setting({}, "settings of its pods that are not the fleet's")
    ray: dict[str, Any] = setting({}, "settings of its actors that are not the fleet's")

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ConfigError(f"a pool cannot have at least {self.min} and at most {self.max} replicas", param="min")


@dataclass(frozen=True)
class ReplicaTlsSettings:
    """TLS of the connections to replicas whose servers have a certificate (`server.tls_cert` of their pool)."""

    ca_file: str | None = setting(None, "PEM file of the CAs that replicas are trusted by; auto: the system's")
    server_name: str | None = setting(
        None, "name that the replicas' certificates must be good for, as those of pods; auto: each one's address"
    )
    client_cert: str | None = setting(None, "PEM file of the certificate that replicas are shown, if they ask")
    client_key: str | None = setting(None, "PEM file of its private key; auto: in the same file")

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError."""
        with within("replica_tls."):
            return client_context(self.ca_file, self.client_cert, self.client_key)

    @property
    def of_a_gateway(self) -> dict[str, str]:
        """Settings of a model at a gateway beside the controller that say the same."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class FleetSettings:
    name: str = setting("penstock", "of this fleet: controllers with the same name and store share one lease")
    store: str | None = setting(None, "where replicas, demand and decisions are kept: sqlite:///path or postgresql://…")
    driver: Literal["local", "kubernetes", "ray"] = setting("local", "what starts and stops replicas")
    address: str | None = setting(
        None, "of the driver's cluster: a context of the kubeconfig, or Ray's address; auto: the driver finds it"
    )
    gateway: dict[str, Any] | None = setting(
        {}, "settings of a gateway that is started beside; none: gateways run elsewhere"
    )
    slo: Slo = field(default_factory=Slo)
    interruption_url: str | None = setting(
        None,
        "metadata endpoint that announces the end of this machine, asked every 5 s, for the local driver's replicas on "
        "spot capacity; none: no notices",
    )
    every_s: Seconds = setting(1.0, "how often pools are looked at")
    driver_timeout_s: Seconds = setting(
        30.0, "a call of a driver that takes longer, a stop's grace aside, has failed; it is tried again ever later"
    )
    lease: Literal["auto", "store", "kubernetes"] = setting(
        "auto", "where the lease is kept; auto: with the driver kubernetes a Lease of the cluster, else the store"
    )
    lease_s: Seconds = setting(10.0, "a controller that has not renewed its lease for so long is replaced")
    spend_per_hour: Amount | None = setting(None, "no replica is started beyond it, all pools together")
    advisory: bool = setting(False, "of every pool that does not say: something else starts and stops its replicas")
    replica_tls: ReplicaTlsSettings = field(default_factory=ReplicaTlsSettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)

    def pool_settings(self) -> dict[str, PoolSettings]:
        found = {}
        for name, values in self.pools.items():
            with within(f"pools.{name}."):
                model, version = version_of(name)
                if name != pool_of(model, version):
                    said = f"'{BASE}' is the version whose pool has no version in its name: call it '{model}'"
                    raise ConfigError(said)
                served = str(values.get("serves") or name)
                ours = {"model": served.partition("@")[0], "advisory": self.advisory}
                found[name] = build(PoolSettings, ours | values, where=f"pools.{name}.")
        for name, pool in found.items():
            with within(f"pools.{name}."):
                _check_serves(name, pool, found)
        return found

    def slo_of(self, name: str, pool: PoolSettings) -> Slo:
        """The fleet's objectives, with the pool's own over them."""
        own = build(Slo, pool.slo, where=f"pools.{name}.slo.")
        return replace(self.slo, **{key: getattr(own, key) for key in pool.slo})


def _check_serves(name: str, pool: PoolSettings, pools: Mapping[str, PoolSettings]) -> None:
    served = pools.get(pool.serves or name)
    if served is None or served.role == "prefill" or served.serves not in (None, pool.serves or name):
        raise ConfigError(
            f"'{pool.serves or name}' is no pool that answers by itself: name one with the role decode or both",
            param="serves",
        )


def replica_settings(pool: str, settings: PoolSettings, slo: Slo, *, shares_machine: bool = True) -> Settings:
    """Settings of a replica of a pool. It serves its model's name, whatever its version. Replicas on the CPUs of this
    machine share the cores out, as many as there may be."""
    engine, server = settings.engine, {"name": (settings.serves or pool).partition("@")[0], **settings.server}
    if settings.role != "both":
        server["role"] = settings.role
        engine = replace(engine, kv_port=engine.kv_port or 0)
    if engine.threads is None and not settings.gpus and shares_machine:
        engine = replace(engine, threads=max(1, usable_cores() // settings.max))
    return Settings(settings.model, engine, build(ServerSettings, server, where=f"pools.{pool}.server."), slo)
