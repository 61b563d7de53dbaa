"""The replicas a gateway sends work to: how to reach each, and what it last said of itself.

A penstock replica pushes a report whenever it changes; one that falls silent is stale, then out (`core.replica`), and
one that reports work without steps hangs. A server that has no such reports is a provider: as large as it likes, and
asked at an interval whether it is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol
from zlib import crc32

import msgspec

from penstock.api import relay
from penstock.api.replica_report import ReplicaReport, decode
from penstock.core.replica import GONE_AFTER_S, UNBOUNDED_LIMITS, ReplicaSnapshot, ReplicaState
from penstock.core.request import KvSource, Priority
from penstock.core.settings import Role
from penstock.dialects.dialect import Handover
from penstock.dialects.engines import DIALECTS
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.handover import BOOTSTRAP_PORT
from penstock.dialects.liveness import Answer
from penstock.dialects.requests import Adapter, RequestOptions
from penstock.gateway.proxy.cache_salt import CacheSalts
from penstock.gateway.replicas.dialect_upstream import DialectUpstream
from penstock.gateway.replicas.engine_poller import EnginePoller
from penstock.gateway.replicas.fetch import fetch
from penstock.gateway.replicas.kv_sources import KvEventSettings
from penstock.gateway.replicas.probe import Prober
from penstock.gateway.replicas.silence import SilenceTimer
from penstock.health.replica_health import ReplicaHealth
from penstock.health.reports import snapshot_of
from penstock.health.settings import HealthSettings
from penstock.http.call import Call, Failure
from penstock.http.clock import Timer
from penstock.http.message import ResponseHead, render
from penstock.http.upstream import Upstream
from penstock.observe.redaction import redact
from penstock.tenancy.tenants import Tenant

log = logging.getLogger("penstock.gateway")

_RETRY_S, _MAX_RETRY_S = 0.25, 1.0
_ASK_BACK_S = 5.0
_LOOK_S = 0.5  # how often a provider is looked at: its breaker and its share change by time alone
_NEEDS_SECRET = b'"permission_denied"'  # so says a penstock replica to a gateway that does not know its secret

_GIVE_BACK = relay.GIVE_BACK_PATH.encode()
_NAMESPACE = relay.NAMESPACE_HEADER.encode()
_TENANT = relay.TENANT_HEADER.encode()
_WATERMARK = relay.WATERMARK_HEADER.encode()
_KV_SOURCE = relay.KV_SOURCE_HEADER.encode()
STREAM_HEADER = render([(relay.HEADER.encode(), relay.STREAM.encode())])
WHOLE_HEADER = render([(relay.WHOLE_HEADER.encode(), b"relayed")])
ENVELOPE_HEADER = render([(relay.HEADER.encode(), relay.ENVELOPE.encode())])

_PARKED = ("parking", "parked", "waking")  # as its report has it
_USABLE = (ReplicaState.READY, ReplicaState.DEGRADED)


def kv_source_header(source: KvSource | None) -> bytes:
    """The header that tells a penstock replica where to pull KV blocks of the prompt from; None: it is told nothing."""
    return b"" if source is None else render([(_KV_SOURCE, relay.write_kv_source(source).encode())])


class InFlightRequest(Protocol):
    """A request that is at a replica."""

    is_stream: bool

    def id_to_move(self) -> str | None:
        """The id of a stream that another replica could carry on now; None: it is better left where it is."""

    def replica_lost(self) -> None: ...


class Replica:
    def __init__(
        self,
        url: str,
        *,
        model: str,
        upstream: Upstream,
        key: str | None = None,
        secret: str | None = None,
        health: HealthSettings | None = None,
        probe_every_s: float | None = None,
        deep_probe_every_s: float | None = None,
        id: str | None = None,
        served_as: str | None = None,
        dialect: str = "openai",
        kv_events: KvEventSettings | None = None,
        sends_priority: bool = False,
        adapters: Mapping[str, str | None] | None = None,
        salts: CacheSalts | None = None,
        zone: str = "",
        role: Role | None = None,
        bootstrap_port: int = BOOTSTRAP_PORT,
        kv_layout: str | None = None,
    ) -> None:
        """`model`: the pool it is in; `served_as`: what it calls the model itself, if that is another name. `salts`:
        the same for all replicas of a gateway. `role` and what follows: of a server that is not penstock's and shares
        requests with others."""
        self.id = id or url
        self.name = f"{model}-{crc32(self.id.encode()) & 0xFFFF:04x}"  # towards clients, who need no addresses
        self.model = model
        self.zone = zone  # its failure domain; empty: not known
        self.served_as = served_as or model
        self.upstream = upstream
        self.dialect = dialect  # of `dialects`, if it is no penstock replica; auto: it is found out
        self.kv_events = kv_events
        self.adapters = adapters or {}  # that it is to have, and where it finds them; None: it has it already
        self.unwanted: set[str] = set()  # that it was given by an earlier configuration, and is to have no longer
        self.loaded: frozenset[str] = frozenset()  # of `adapters`, where it does not say itself what it has
        self.listed: frozenset[str] = frozenset()  # that it names among its models, if it is no penstock replica
        self.salts = salts or CacheSalts(b"")
        self.bootstrap_port = bootstrap_port
        self._role = role
        self._kv_layout = kv_layout
        self._sends_priority = sends_priority
        self.has_key = key is not None  # it is somebody else's, and paid for
        self.in_flight: set[InFlightRequest] = set()
        self._flight_s, self._flight_at = 0.0, upstream.clock.now()  # requests in flight times seconds, until then
        self.is_draining = False  # this gateway sends it nothing new
        self.fleet_state = ""  # why, if a controller keeps it without traffic (`tenancy.replicas.RESTING`)
        self.reconnect: Callable[[], None] = lambda: None  # at once, if it was lost and is to be tried again later
        self.source = "file"  # that names it; `gateway.membership` knows others
        self._left: Callable[[Replica], None] | None = None
        self.report: ReplicaReport | None = None  # the last; None: it makes none
        self.is_asleep = False  # it says that it has given its device's memory back, as vLLM's sleep mode does
        self.prefill_speed: float | None = None  # as it measured it
        self.text = ""  # the digest of its tokenizer and chat template; empty: it has not said
        self.relays = False  # streams can be carried on: it is a penstock replica
        self.health = ReplicaHealth(health)
        self.breaker = self.health.breaker
        self.probe_every_s = probe_every_s  # None: as all are
        self.deep_probe_every_s = deep_probe_every_s
        stale_after_s = self.health.settings.stale_after_s
        self._said = ReplicaSnapshot(
            id=self.id, url=url, models=(model,), state=ReplicaState.OUT, stale_after_s=stale_after_s
        )
        self.snapshot = self._said  # with what this gateway thinks of it
        headers = [(b"content-type", b"application/json")]
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        if secret is not None:
            headers.append((relay.SECRET_HEADER.encode(), secret.encode()))
        self.headers = render(headers)
        self._has_warned = False

    def way(self, tenant: Tenant, target: bytes, body: bytes, adapter: str = "") -> Upstream:
        """The upstream for a tenant's request: its cache is the tenant's own. Raises why it is not sent."""
        upstream = self.upstream
        if self.relays or not isinstance(upstream, DialectUpstream):
            return upstream
        priority = tenant.priority.priority if self._sends_priority else Priority.NORMAL
        named = Adapter(adapter, self.adapters.get(adapter) or "", self.served_as) if adapter else None
        salt = partial(self.salts.salt, tenant.namespace)
        return upstream.wishing(RequestOptions(salt=salt, priority=priority, adapter=named), target, body)

    def configure_adapters(self, adapters: Mapping[str, str | None]) -> None:
        self.unwanted = (self.unwanted | self.adapters.keys()) - adapters.keys()
        self.adapters = adapters

    def headers_for(self, tenant: Tenant, *, relayed: bytes = b"") -> bytes:
        """Headers with what a penstock replica must know besides the client's bytes; `relayed`: the kind of stream."""
        if not self.relays:
            return self.headers
        mark = b"%b: %b\r\n" % (_WATERMARK, tenant.watermark.encode()) if tenant.watermark else b""
        who = relay.tenant_value(relay.Tenancy(tenant.id, tenant.weight, tenant.priority.priority))
        named = b"%b: %b\r\n%b: %b\r\n" % (_NAMESPACE, tenant.namespace.encode(), _TENANT, who)
        return b"%b%b%b%b" % (self.headers, named, mark, relayed)

    @property
    def url(self) -> str:
        return self._said.url

    @property
    def kind(self) -> str:
        """penstock, or the dialect it speaks, as far as that is known."""
        if self.relays:
            return "penstock"
        dialect = self.upstream.dialect_name if isinstance(self.upstream, DialectUpstream) else ""
        return dialect or self.dialect

    @property
    def handover(self) -> Handover | None:
        """How it shares requests with another of its kind; None: it does not."""
        upstream = self.upstream
        if self.relays or self._role is None or not isinstance(upstream, DialectUpstream) or upstream.dialect is None:
            return None
        handover = upstream.dialect.handover
        return None if handover == "room" and self._role == "both" else handover

    def heard(self, said: ReplicaSnapshot) -> None:
        self._said = said if self.relays or self._role is None else self._with_role(said)

    def _with_role(self, said: ReplicaSnapshot) -> ReplicaSnapshot:
        """The role and the layout that the operator has given a server: it tells neither. All servers of a pool that
        speak alike count as alike."""
        handover, upstream = self.handover, self.upstream
        if handover is None:
            self._warn_of_role()
            return said
        assert self._role is not None
        return msgspec.structs.replace(
            said,
            role=self._role,
            kv_address=f"{upstream.host}:{self.bootstrap_port if handover == 'room' else upstream.port}",
            kv_layout=self._kv_layout or f"{self.kind}:{self.model}",
            pulls_prefixes=False,
            needs_peer=handover == "room",
        )

    def _warn_of_role(self) -> None:
        """Once."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s speaks %s: it shares no requests with others, and its role %s has no effect",
                redact(self.url),
                self.kind,
                self._role,
            )

    def lists(self, adapters: frozenset[str]) -> None:
        """Takes the adapters it names as those it has, if it ever named any: others may have taken some away."""
        if adapters or self.listed:
            self.loaded &= adapters
        self.listed = adapters

    def lost(self) -> None:
        self.is_asleep = False
        self._said = msgspec.structs.replace(self._said, state=ReplicaState.OUT)

    def seen(self, now: float) -> ReplicaSnapshot:
        snapshot = self.health.mark(self._said, now)
        if self.is_draining and snapshot.state in _USABLE:
            snapshot = msgspec.structs.replace(snapshot, state=ReplicaState.DRAINING)
        self.snapshot = snapshot
        return snapshot

    @property
    def is_resting(self) -> bool:
        """It is without traffic on purpose: a controller keeps it so, or it is parked."""
        return (self.is_draining and self.fleet_state != "") or self.is_parked

    def keep_in(self, fleet_state: str, *, is_draining: bool) -> None:
        """A controller, or an operator, has changed whether it is used. One that rested is used without another
        probe: a token came out of it."""
        if self.is_resting and not is_draining:
            self.health.trust()
        self.fleet_state, self.is_draining = fleet_state, is_draining
        self.reconnect()

    def attach(self, request: InFlightRequest) -> None:
        self.flight_s()
        self.in_flight.add(request)

    def detach(self, request: InFlightRequest) -> None:
        self.flight_s()
        self.in_flight.discard(request)
        if self._left is not None and not self.in_flight:
            left, self._left = self._left, None
            left(self)

    def flight_s(self) -> float:
        """Requests in flight times the seconds that they were, so far: its growth over a span, divided by the span, is
        how many there were in the mean."""
        now = self.upstream.clock.now()
        self._flight_s += len(self.in_flight) * (now - self._flight_at)
        self._flight_at = now
        return self._flight_s

    def leave(self, left: Callable[[Replica], None]) -> None:
        """Streams go on elsewhere as soon as they can, the rest ends here; `left` is told when nothing is left."""
        self.is_draining = True
        if self.in_flight:
            self._left = left
        else:
            left(self)

    def is_starting(self, now: float) -> bool:
        """Its process is there and loads its model."""
        report = self.report
        return report is not None and report.state == "starting" and now - self._said.taken_at <= GONE_AFTER_S

    @property
    def is_parked(self) -> bool:
        """Its process is there and has given its device's memory back, or is about to, or takes it again."""
        says_parked = self.report is not None and self.report.state in _PARKED
        return self.is_asleep or (self._said.state is ReplicaState.DRAINING and says_parked)

    def send_away(self) -> None:
        """It hangs, or is gone: what it has of ours goes on elsewhere."""
        for request in list(self.in_flight):
            request.replica_lost()


Changed = Callable[[Replica], None]


class Follower:
    """Reads one replica's reports for as long as the gateway runs; of a server that has none, sees to its probes."""

    def __init__(self, replica: Replica, changed: Changed) -> None:
        self._replica = replica
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._clock = replica.upstream.clock
        self._silence = SilenceTimer(self._clock, replica.health.settings.silent_after_s, self._fell_silent)
        self._call: Call | None = None
        self._asking_back: asyncio.Task[Answer | Failure] | None = None
        self._timer: Timer | None = None
        self._prober: asyncio.Task[None] | None = None
        self._foreign: EnginePoller | None = None
        self._head: ResponseHead | None = None
        self._rest = b""
        self._has_warned = False
        self._retry_s = _RETRY_S
        self._is_lost = False
        replica.reconnect = self._reconnect
        self._connect()

    def close(self) -> None:
        self._replica.reconnect = lambda: None
        if self._foreign is not None:
            self._foreign.close()
        if self._prober is not None:
            self._prober.cancel()
        if self._asking_back is not None:
            self._asking_back.cancel()
        self._silence.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._call is not None:
            self._call.cancel()

    # -- what the replica says

    def head(self, head: ResponseHead) -> None:
        self._head = head
        self._rest = b""

    def data(self, data: bytes, is_last: bool) -> None:
        if not self._silence.heard():
            self._replica.health.start_over()
        assert self._head is not None
        self._rest += data
        content_type = self._head.headers.get(b"content-type", b"")
        has_reports = self._head.status == 200 and content_type.startswith(b"text/event-stream")
        if has_reports:
            *events, self._rest = self._rest.split(b"\n\n")
            if events:
                self._take(events[-1])
        if is_last:
            self._warn_of_secret()
            is_unclear = has_reports or self._head.status >= 500 or _NEEDS_SECRET in self._rest
            self._lost() if is_unclear else self._is_provider()

    def _warn_of_secret(self) -> None:
        """Once: it would look as if it never became ready."""
        if _NEEDS_SECRET in self._rest and not self._has_warned:
            self._has_warned = True
            replica = self._replica
            log.warning("%s wants its gateway_secret: set models.%s.secret_env", redact(replica.url), replica.model)

    def failed(self, failure: Failure) -> None:
        self._lost()

    # -- inside

    def _reconnect(self) -> None:
        if self._is_lost and self._timer is not None:
            self._timer.cancel()
            self._connect()

    def _connect(self) -> None:
        self._is_lost = False
        self._call = self._replica.upstream.send(b"GET", b"/v1/penstock/snapshots", self._replica.headers, b"", self)
        self._silence.begin()

    def _fell_silent(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._lost()
        self._replica.send_away()

    def _take(self, event: bytes) -> None:
        try:
            report = decode(event.removeprefix(b"data: "))
        except msgspec.DecodeError:
            return
        replica = self._replica
        replica.relays = True
        replica.report = report
        replica.text = report.text
        replica.prefill_speed = report.measured.speeds.prefill_tokens_per_s
        self._retry_s = _RETRY_S
        if self._prober is None:
            prober = self._new_prober(replica.health.settings.deep_probe_every_s)
            self._prober = self._loop.create_task(prober.watch_engine())
        heard_at = self._silence.heard_at
        is_lost = replica.health.hangs(report.measured, heard_at)
        replica.heard(snapshot_of(report, replica.snapshot, heard_at))
        self._changed(replica)
        if is_lost:
            replica.send_away()
        elif (report.is_draining or replica.is_draining) and (self._asking_back is None or self._asking_back.done()):
            self._ask_back()

    def _ask_back(self) -> None:
        """Asks a replica that drains for the streams that can go on elsewhere. What cannot has its time there."""
        replica = self._replica
        ids = [found for request in replica.in_flight if (found := request.id_to_move()) is not None]
        if ids:
            body = msgspec.json.encode(relay.GiveBack(ids))
            asking = fetch(replica.upstream, _GIVE_BACK, replica.headers, timeout_s=_ASK_BACK_S, body=body)
            self._asking_back = self._loop.create_task(asking)

    def _is_provider(self) -> None:
        """How much it can take, its answers tell; whether it is there, probes, unless they are not wanted."""
        self._silence.stop()
        self._call = None
        replica, dialect = self._replica, DIALECTS.get(self._replica.dialect)
        replica.relays = False
        if dialect is None or (dialect is not OPENAI and replica.probe_every_s != 0):
            self._foreign = EnginePoller(
                replica, partial(self._changed, replica), dialect=dialect, is_plain=self._is_plain
            )
        else:
            if isinstance(replica.upstream, DialectUpstream):
                replica.upstream.dialect = dialect
            self._is_plain()

    def _is_plain(self) -> None:
        """It says nothing of itself."""
        if self._foreign is not None:
            self._foreign.close()
        replica = self._replica
        if replica.probe_every_s != 0:
            replica.health.await_probe()
            self._prober = self._loop.create_task(self._new_prober(0.0).watch_server())
        else:
            replica.health.probed(True)  # what it is was asked, perhaps, and nothing will be
        replica.heard(
            ReplicaSnapshot(
                id=replica.id,
                url=replica.url,
                models=(replica.model,),
                state=ReplicaState.READY,
                reports=False,
                limits=UNBOUNDED_LIMITS,
            )
        )
        self._look()

    def _look(self) -> None:
        self._timer = self._clock.call_later(_LOOK_S, self._look)
        self._changed(self._replica)

    def _new_prober(self, deep_every_s: float) -> Prober:
        replica = self._replica
        every_s, own_deep_s = replica.probe_every_s, replica.deep_probe_every_s
        return Prober(
            replica,
            self._probed,
            every_s=replica.health.settings.probe_every_s if every_s is None else every_s,
            deep_every_s=deep_every_s if own_deep_s is None else own_deep_s,
        )

    def _probed(self) -> None:
        replica = self._replica
        self._changed(replica)
        if replica.relays and not replica.health.is_in:
            replica.send_away()

    def _lost(self) -> None:
        self._silence.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._call = None
        self._is_lost = True
        # First: whatever goes wrong with those who are told, the replica is tried again.
        self._timer = self._clock.call_later(self._retry_s, self._connect)
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        replica = self._replica
        replica.lost()
        self._changed(replica)
        if replica.report is None or not replica.report.is_draining:  # else their own connections tell how they end
            replica.send_away()
