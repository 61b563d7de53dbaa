"""Replicas by the settings of their pool."""

from __future__ import annotations

import os
import ssl
from collections import Counter

from penstock.core.config import within
from penstock.core.errors import ConfigError
from penstock.dialects.engines import DIALECTS
from penstock.gateway.membership.file import members_of
from penstock.gateway.proxy.cache_salt import KEY_BYTES, CacheSalts
from penstock.gateway.replicas.dialect_upstream import DialectUpstream
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.settings.gateway import ModelSettings, from_environment, pools_of, tls_of
from penstock.health.settings import HealthSettings
from penstock.http.clock import LOOP_CLOCK, TimerClock

DIALECT_NAMES = ("auto", *DIALECTS)
_PAID_PROBE_S = 60.0  # a server that wants a key is somebody else's, and asked rarely


class ReplicaFactory:
    def __init__(
        self,
        health: HealthSettings | None = None,
        clock: TimerClock = LOOP_CLOCK,
        salts: CacheSalts | None = None,
    ) -> None:
        """`salts`: of tenants' caches in servers that are not penstock's; None: of a key that nobody has."""
        self._health = health
        self._clock = clock
        self._salts = salts or CacheSalts(os.urandom(KEY_BYTES))

    def make(self, name: str, pool: ModelSettings, url: str, replica_id: str) -> Replica:
        """Raises ConfigError. `name` is the pool's."""
        check_dialect(pool.dialect)
        if pool.kv_events is not None and pool.dialect != "auto" and not DIALECTS[pool.dialect].has_kv_events:
            raise ConfigError(f"a server that speaks {pool.dialect} publishes no KV events", param="kv_events")
        _check_role(pool)
        key, secret = from_environment(pool.key_env, "key_env"), from_environment(pool.secret_env, "secret_env")
        probe_every_s, tls = pool.probe_every_s, tls_of(name, pool)
        if probe_every_s is None and key is not None:
            probe_every_s = _PAID_PROBE_S
        return Replica(
            url,
            model=name,
            served_as=pool.served_as,
            upstream=_upstream(url, pool, tls if url.startswith("https://") else None, self._clock),
            key=key,
            secret=secret,
            health=self._health,
            probe_every_s=probe_every_s,
            deep_probe_every_s=pool.deep_probe_every_s,
            kv_events=pool.kv_events,
            sends_priority=pool.send_priority,
            adapters=pool.adapters,
            salts=self._salts,
            dialect="openai" if key and pool.dialect == "auto" else pool.dialect,  # a paid one is not asked around
            id=replica_id,
            zone=pool.zone,
            role=pool.role,
            bootstrap_port=pool.bootstrap_port,
            kv_layout=pool.kv_layout,
        )


def check_dialect(name: str) -> None:
    """Raises ConfigError."""
    if name not in DIALECT_NAMES:
        raise ConfigError(f"'{name}' is no dialect: {', '.join(DIALECT_NAMES)}", param="dialect")


def _check_role(pool: ModelSettings) -> None:
    """Raises ConfigError. Of a server whose dialect is not known yet nothing can be said."""
    if pool.role is None or pool.dialect == "auto":
        return
    able = [name for name, dialect in DIALECTS.items() if dialect.handover is not None]
    handover = DIALECTS[pool.dialect].handover
    if handover is None:
        raise ConfigError(
            f"servers that speak {pool.dialect} do not hand prompts over; those that do: {', '.join(able)}",
            param="role",
        )
    if handover == "room" and pool.role == "both":
        raise ConfigError(
            f"a server of {pool.dialect} is started for prefill or for decode; one that is neither has no role",
            param="role",
        )


def replicas_of(
    models: dict[str, ModelSettings],
    health: HealthSettings | None = None,
    clock: TimerClock = LOOP_CLOCK,
    salts: CacheSalts | None = None,
) -> list[Replica]:
    """The replicas of a configuration, made to be looked at. Raises ConfigError."""
    factory, found = ReplicaFactory(health, clock, salts), []
    members = members_of(pools_of(models))
    counts = Counter(member.url for member in members)
    for member in members:
        with within(f"models.{member.pool.replace('@', '.versions.')}."):
            replica_id = member.url if counts[member.url] == 1 else member.long_id
            found.append(factory.make(member.pool, member.settings, member.url, replica_id))
    return found


def _upstream(url: str, pool: ModelSettings, tls: ssl.SSLContext | None, clock: TimerClock) -> DialectUpstream:
    with within("replicas"):
        upstream = DialectUpstream.from_url(url, tls=tls, server_name=pool.server_name, clock=clock)
    upstream.forward_fields = frozenset(pool.forward_fields)
    upstream.asks_usage = pool.stream_usage
    return upstream
