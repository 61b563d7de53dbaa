"""A gateway, put together and run until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.admission.admission import Admission
from penstock.api.page_guard import PageGuard
from penstock.api.responses.stored import MAX_BYTES
from penstock.cli import sd_notify
from penstock.cli.admin_port import administered
from penstock.cli.certificates import Certificates
from penstock.cli.gateway_worker import GatewayWorker
from penstock.cli.grpc_port import grpc_of_gateway
from penstock.cli.listening import listening_socket
from penstock.cli.logs import log_the_uncaught, write_lines_bare
from penstock.cli.pipeline import load_pipelines
from penstock.cli.telemetry import gateway_traces, pushed_metrics
from penstock.console.feed import Feed
from penstock.console.gateway_source import GatewaySource
from penstock.core.errors import ConfigError
from penstock.core.private_files import make_private
from penstock.core.rollout import RolloutOrder
from penstock.core.slo import Slo
from penstock.gateway.app import Gateway
from penstock.gateway.batches.object_store import object_store
from penstock.gateway.batches.service import BatchService
from penstock.gateway.demand.meter import DemandMeter
from penstock.gateway.demand.reporter import DemandReporter
from penstock.gateway.demand.statuses import PoolStatuses
from penstock.gateway.endpoint_picker.picker import EndpointPicker
from penstock.gateway.membership.dns import DnsSource
from penstock.gateway.membership.factory import ReplicaFactory, replicas_of
from penstock.gateway.membership.kubernetes import KubernetesSource
from penstock.gateway.membership.membership import Membership
from penstock.gateway.membership.store import StoreSource
from penstock.gateway.monitor.monitor import Monitor
from penstock.gateway.monitor.state import state_of
from penstock.gateway.pipelines.service import PipelineService, with_pipelines
from penstock.gateway.records import request_log
from penstock.gateway.records.decision_log import DecisionLog, path_of_its_own
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.request_log import RequestLog
from penstock.gateway.responses.service import ResponseService
from penstock.gateway.rollouts.board import RolloutBoard
from penstock.gateway.rollouts.readiness import Readiness
from penstock.gateway.rollouts.writer import RolloutWriter
from penstock.gateway.settings.gateway import (
    LOOPBACK,
    GatewaySettings,
    admission_of,
    pools_of,
    router_of,
    routes_of,
    salts_of,
)
from penstock.gateway.settings.monitor import slack_of, slos_of
from penstock.gateway.settings.reload import Configuration
from penstock.gateway.settings.route_board import RouteBoard
from penstock.gateway.settings.version_declarer import VersionDeclarer
from penstock.gateway.tenant_services import TenantServices
from penstock.gateway.websockets import websockets
from penstock.http.clock import LOOP_CLOCK
from penstock.http.cors import Cors
from penstock.http.limits import ClientLimits
from penstock.http.server import Server
from penstock.hub.home import penstock_home
from penstock.observe.otlp.environment import telemetry_of
from penstock.observe.registry import Registry
from penstock.oip.calls import Calls
from penstock.oip.over_http import OverHttp
from penstock.oip.tensor_relay import TensorRelay
from penstock.rollout.elected import ElectedRunner
from penstock.router.routes import version_key
from penstock.tenancy.admins import AdminRing
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.fleet import PoolStatus
from penstock.tenancy.follower import Follower
from penstock.tenancy.journal import Journal
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.ledger import Ledger
from penstock.tenancy.limits.limiter import Limiter
from penstock.tenancy.limits.shared import SharedLimiter
from penstock.tenancy.routes import Declared
from penstock.tenancy.store import open_store
from penstock.websocket.endpoint import PATHS

if TYPE_CHECKING:
    from penstock.oip.over_grpc import OverGrpc
    from penstock.tenancy.limits.redis import RedisLimiter

log = logging.getLogger("penstock.gateway")

_DRAIN_S = 30.0
_COLLECT = (10_000, 20, 20)  # a request makes a hundred objects and no cycle: to look often finds nothing
_SWITCH_S = 0.0005  # how long a thread that renders a long prompt may keep the event loop waiting


class Opened(NamedTuple):
    """A gateway that takes requests."""

    listener: socket.socket
    lines: list[str]  # for the terminal
    has_tenants: bool
    num_ready: Callable[[], Awaitable[int]]  # replicas


async def serve(
    settings: GatewaySettings,
    url: str,
    on_open: Callable[[Opened], None] | None = None,
    worker: GatewayWorker | None = None,
    read: Callable[[], GatewaySettings] | None = None,
    *,
    picks: bool = False,
) -> None:
    """Serves until a signal ends it. `worker`: one of several processes, with listening sockets from a supervisor.
    `read`: the settings from their file again, for a reload. `picks`: it is an Endpoint Picker, and has no public
    port."""
    log_the_uncaught()
    sys.setswitchinterval(_SWITCH_S)
    models, pushed = settings.pools(), telemetry_of(settings.telemetry, "penstock-gateway")
    replicas_of(models, settings.health)  # raises what is wrong before a port or a store is opened
    if picks and settings.pipelines:
        raise ConfigError("an Endpoint Picker has no pipelines: it answers no request itself", param="pipelines")
    pipelines = load_pipelines(settings.pipelines)
    routes, added = RouteBoard(with_pipelines(routes_of(models), pipelines)), StoreSource()
    orders = RolloutBoard()
    loop = asyncio.get_running_loop()
    keys, admins, budgets = KeyRing(), AdminRing(), Budgets()
    prices = {name: pool.price for name, pool in pools_of(models).items()}
    # The follower has a store of its own: a revocation must not wait for a ledger's write.
    journal = Journal(penstock_home() / "usage" / _digest(url))
    with Ledger(open_store(url).usage, budgets, journal) as ledger:
        store = open_store(url)
        slos, slack = slos_of(settings.slo, models), slack_of(settings.watch.alerts)
        with_slo = partial(_with_slo, slos=slos, default=settings.slo)
        store.routes.declare(map(with_slo, routes.declared()))
        rollouts = ElectedRunner(open_store(url))
        follower = Follower(
            store,
            lambda states: loop.call_soon_threadsafe(keys.apply, states),
            lambda found: loop.call_soon_threadsafe(admins.apply, found),
            lambda found: loop.call_soon_threadsafe(routes.apply, found),
            lambda found: loop.call_soon_threadsafe(added.apply, found),
            partial(_apply_orders, loop, orders, rollouts),
        )
        with (
            follower,
            _request_log(settings) as lines,
            _decision_log(settings) as decisions,
            gateway_traces(pushed) as traces,
        ):
            await asyncio.sleep(0)  # what the follower found first is applied
            tls = settings.tls()
            listener = None if picks else _public_listener(settings, keys, worker)
            async with _limiter(settings, url) as limiter:
                pages = PageGuard(settings.host, settings.allowed_hosts, settings.allowed_origins)
                services = TenantServices(keys, limiter, budgets, ledger, prices, store.adapters, pages)
                recorder = GatewayRecorder(lines, decisions, traces)
                recorder.usage_lost = ledger.lost
                admission = Admission(router_of(settings, models), admission_of(settings), slos)
                headers, resume_wait_s = settings.route_headers, settings.resume_wait_s
                # The store of responses has a connection of its own: nobody's key waits for a large answer's write.
                kept = None if picks else _responses(settings, url, ledger)
                batches = None if picks else _batches(settings, url, services)
                served = PipelineService(pipelines)
                make = (
                    partial(EndpointPicker, settings)
                    if picks
                    else partial(Gateway, responses=kept, batches=batches, pipelines=served)
                )
                gateway = make(
                    routes.table, services, admission, recorder, explains=headers, resume_wait_s=resume_wait_s
                )
                routes.changed = gateway.use
                declarer = VersionDeclarer(open_store(url).routes, routes.adopt)
                routes.found = lambda found: declarer.add([with_slo(one) for one in found])
                routes.reread = lambda declared: declarer.declare([with_slo(one) for one in declared])
                factory = ReplicaFactory(settings.health, salts=salts_of(settings, penstock_home()))
                membership = Membership(gateway.replicas, factory, store.adapters.all())
                configuration = Configuration(
                    settings, routes, membership, gateway.pools, admission, prices, served, load_pipelines
                )
                configuration.read = read
                configuration.apply(settings)
                names, pods = DnsSource(settings.dns), KubernetesSource(settings.kubernetes)
                for source in (names, pods, added):  # the store can drain what the configuration names, and add to it
                    source.changed = membership.refresh
                    membership.add_source(source)
                certificates = Certificates(tls, gateway.replicas, membership, recorder)
                tower = Monitor(
                    gateway.replicas,
                    gateway.admission,
                    gateway.recorder,
                    gateway.clock,
                    slos,
                    settings.watch,
                    slack=slack,
                )
                configuration.follow(tower.watch, gateway.now)
                feed = Feed(GatewaySource(gateway, keys, budgets))
                statuses = PoolStatuses(admission, gateway.queue, gateway.now, configuration.manage)

                def apply_statuses(found: Mapping[str, PoolStatus]) -> None:
                    statuses.apply(found)
                    gateway.tensor_pools = {pool for pool, one in found.items() if one.takes_tensors}
                    tower.pools.apply(found)

                apply_statuses({one.pool: one for one in store.fleet.pools()})
                demand = DemandReporter(open_store(url).fleet, DemandMeter(gateway), gateway.clock, apply_statuses)
                gateway.queue.first_held = demand.report_now
                demand.start()
                rollouts.start(
                    Readiness(lambda: routes.table, gateway.pools, gateway.now),
                    lambda found: loop.call_soon_threadsafe(tower.rollouts.apply, found),
                )
                measured = RolloutWriter(open_store(url).rollouts, demand.gateway, gateway.clock)
                measured.start()
                orders.follow(gateway, measured)
                try:
                    reload = partial(_reload_everywhere, configuration, worker)
                    async with administered(settings, url, gateway, admins, keys, feed, tower, tls, reload, worker) as (
                        app,
                        gate,
                        notice,
                    ):
                        look, num_ready = partial(_look, gateway), partial(_num_ready, gateway)
                        stop: Callable[[], Awaitable[object]]
                        if isinstance(gateway, EndpointPicker):
                            from penstock.gateway.endpoint_picker.server import EndpointPickerServer

                            picker = EndpointPickerServer(gateway)
                            line, stop = await picker.listen(), picker.stop
                        else:
                            assert listener is not None
                            limits = ClientLimits(
                                max_body_bytes=settings.max_body_bytes, max_arriving_bytes=settings.max_arriving_bytes
                            )
                            tensors = TensorRelay(
                                app, gateway.takes_tensors, gateway.can_serve, max_body_bytes=settings.max_body_bytes
                            )
                            calls = Calls(
                                app,
                                gate,
                                gateway.can_serve,
                                max_body_bytes=settings.max_body_bytes,
                                tensors=tensors,
                            )
                            over_http, cors = OverHttp(app, calls, gate), Cors.of(settings.allowed_origins)
                            front = websockets(gateway, settings.websocket).over(over_http)
                            server = Server(front, limits, gate=over_http, cors=cors, uploads=batches, upgrades=PATHS)
                            grpc = grpc_of_gateway(settings, calls, has_siblings=worker is not None)
                            if worker is not None:
                                used = sum(not replica.is_draining for replica in gateway.replicas.values())
                                await worker.warm_up(num_ready, used)
                                worker.accepts_by(server)
                            await server.listen(listener, tls=tls)
                            stop = partial(server.stop, _DRAIN_S)
                            line = _ready_line(settings, listener, keys, [one.name for one in pipelines])
                            if grpc is not None:
                                notice = f"{notice}\n{await grpc.listen()}"
                                stop = partial(_stop_both, server, grpc)
                                if worker is not None:
                                    worker.accepts_by(grpc)
                        again = _reload_on_hangup(configuration, certificates)
                        told, words = _told_to_end(), [line, notice]
                        print(*words, sep="\n", flush=True)
                        async with nullcontext() if worker is None else worker.answering(look, num_ready, again):
                            if on_open is not None and listener is not None:
                                on_open(Opened(listener, words, keys.has_had_tenants, num_ready))
                            sd_notify.notify(sd_notify.READY)
                            gc.freeze()
                            gc.set_threshold(*_COLLECT)
                            async with pushed_metrics(pushed, look):
                                await (told.wait() if worker is None else worker.until_told(told))
                            sd_notify.notify(sd_notify.STOPPING)
                            feed.close()  # or its viewers would be waited for
                            if worker is not None:
                                await worker.hand_over(told)
                            await stop()
                finally:
                    rollouts.close()
                    declarer.close()
                    demand.close()
                    names.close()
                    await pods.close()
                    tower.close()
                    gateway.close()
                    measured.close()


def _responses(settings: GatewaySettings, url: str, ledger: Ledger) -> ResponseService:
    # Ids of items and the conversation before them make a body longer than the one that came.
    return ResponseService(
        open_store(url).responses,
        settings.responses,
        LOOP_CLOCK,
        ledger,
        max_body_bytes=max(settings.max_body_bytes, MAX_BYTES),
    )


def _batches(settings: GatewaySettings, url: str, services: TenantServices) -> BatchService:
    """Returns batches with their own connection to the store, as responses have. Raises ConfigError for a bad place."""
    store, place = open_store(url), settings.batches.files
    objects = None if place is None else object_store(place)
    return BatchService(
        store.files,
        store.batches,
        settings.batches,
        objects,
        LOOP_CLOCK,
        lambda head: services.caller(head.headers),
    )


def read_again(opened: Callable[[], AbstractContextManager[GatewaySettings]]) -> GatewaySettings:
    """The settings of a file that may have changed, for a reload. What is wrong is raised inside `opened`, which tells
    its line."""
    with opened() as settings:
        models = settings.pools()
        replicas_of(models, settings.health)
        with_pipelines(routes_of(models), load_pipelines(settings.pipelines))
        return settings


async def _stop_both(server: Server, grpc: OverGrpc) -> None:
    await asyncio.gather(server.stop(_DRAIN_S), grpc.stop(_DRAIN_S))


def _public_listener(settings: GatewaySettings, keys: KeyRing, worker: GatewayWorker | None) -> socket.socket:
    _refuse_to_be_open(settings, keys)
    return listening_socket(settings.host, settings.port) if worker is None else worker.public_listener()


def _reload_everywhere(configuration: Configuration, worker: GatewayWorker | None) -> list[str]:
    """Returns what has changed. The other workers of this host are told to read the file again, too."""
    changed = configuration.reload()
    if worker is not None:
        asyncio.get_running_loop().run_in_executor(None, worker.tell_siblings, "reload")
    return changed


def _reload_on_hangup(configuration: Configuration, certificates: Certificates) -> Callable[[], None]:
    """Reloads on SIGHUP only where there is something to read: elsewhere a terminal that is closed ends the gateway, as
    it ends other programs. Returns what a SIGHUP does."""

    def reload() -> None:
        try:
            if configuration.read is not None:
                changed = configuration.reload()
                log.info("the configuration was read again; changed: %s", ", ".join(changed) or "nothing")
        except ConfigError as error:
            log.error("the configuration stays as it is: %s", error.message)
        certificates.reload()

    if configuration.read is not None or certificates.has_any:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    return reload


async def _num_ready(gateway: Gateway) -> int:
    return sum(pool.num_ready for pool in gateway.pools.values())


def _apply_orders(
    loop: asyncio.AbstractEventLoop, board: RolloutBoard, runner: ElectedRunner, found: Iterable[RolloutOrder]
) -> None:
    """Rollouts that are on: what this gateway measures, and what it may have to run."""
    orders = tuple(found)
    runner.apply(orders)
    loop.call_soon_threadsafe(board.apply, orders)


def _with_slo(route: Declared, slos: Mapping[str, Slo], default: Slo) -> Declared:
    """Its objectives are those of its versions' pools, which are the model's unless a version has its own."""
    pools = (version_key(route.name, version) for version in route.weights)
    slo = next((slos[pool] for pool in pools if pool in slos), default)
    return msgspec.structs.replace(route, slo=asdict(slo))


def _look(gateway: Gateway) -> list[Registry]:
    gateway.recorder.look(state_of(gateway.replicas.values(), gateway.pools, gateway.admission, gateway.now()))
    return gateway.recorder.exports


@contextmanager
def _request_log(settings: GatewaySettings) -> Iterator[RequestLog | None]:
    if not settings.request_log or not request_log.log.isEnabledFor(logging.INFO):
        yield None
        return
    write_lines_bare(request_log.log.name)
    with RequestLog(settings=settings.logs) as found:
        yield found


@contextmanager
def _decision_log(settings: GatewaySettings) -> Iterator[DecisionLog | None]:
    if not settings.decision_log:
        yield None
        return
    name = f"gateway-{settings.port}" if settings.port else "gateway"
    with (
        path_of_its_own(penstock_home() / "decisions", name) as path,
        DecisionLog(path, settings.decision_log_bytes) as found,
    ):
        yield found


@asynccontextmanager
async def _limiter(settings: GatewaySettings, store: str) -> AsyncIterator[Limiter]:
    """Gateways that have the same tenants count together: those of a host by themselves, others with Redis."""
    limiter: SharedLimiter | RedisLimiter
    if (redis := settings.limiter_url) is None:
        directory = penstock_home() / "limits" / _digest(store)
        make_private(directory)
        limiter = SharedLimiter(directory)
    else:
        from penstock.tenancy.limits.redis import RedisLimiter  # an extra: penstock[redis]

        limiter = RedisLimiter(redis, on_loss=settings.without_limiter)
    await limiter.start()
    try:
        yield limiter
    finally:
        await limiter.close()


def _digest(store: str) -> str:
    return sha256(store.encode()).hexdigest()[:12]


def _refuse_to_be_open(settings: GatewaySettings, keys: KeyRing) -> None:
    if settings.host not in LOOPBACK and not keys.has_had_tenants and not settings.allow_anonymous:
        raise ConfigError(
            f"there are no tenants, so anybody who can reach {settings.host} could use the models. Add one with "
            "`penstock tenants add NAME` and `penstock keys create NAME`, or start with --allow-anonymous",
            param="host",
        )


def _ready_line(settings: GatewaySettings, listener: socket.socket, keys: KeyRing, pipelines: Iterable[str]) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    who = "for tenants with a key" if keys.has_had_tenants else "open to everybody here: there are no tenants yet"
    scheme = "http" if settings.tls_cert is None else "https"
    models = ", ".join(settings.models) or "none yet"
    served = f"; pipelines: {', '.join(pipelines)}" if pipelines else ""
    return f"penstock gateway at {scheme}://{shown}:{port}, {who}; models: {models}{served}"


def _told_to_end() -> asyncio.Event:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told
