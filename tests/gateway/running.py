"""A gateway in front of replicas that are real but for the model, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import openai
import uvloop

from penstock.admission.admission import Admission
from penstock.admission.settings import AdmissionSettings
from penstock.gateway.app import Gateway
from penstock.gateway.membership.factory import ReplicaFactory
from penstock.gateway.membership.membership import Membership
from penstock.gateway.pipelines.graph import Pipeline
from penstock.gateway.pipelines.service import PipelineService, with_pipelines
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.replicas.lora import ForgetfulNotes
from penstock.gateway.settings.gateway import ModelSettings, pools_of, routes_of
from penstock.gateway.tenant_services import TenantServices
from penstock.gateway.tokens.prompt_tokenizer import PromptTokenizer
from penstock.gateway.websockets import websockets
from penstock.health.settings import HealthSettings
from penstock.http.clock import LoopClock
from penstock.http.server import Server, bound_socket
from penstock.http.tls import ServerTls
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.keys import KeyRing, TenantState, new_key
from penstock.tenancy.limits.limiter import LocalLimiter
from penstock.tenancy.tenants import tenant_from
from penstock.tenancy.usage import Usage
from penstock.websocket.endpoint import PATHS
from penstock.websocket.settings import WebSocketSettings
from tests.clocks import ManualClock, SlowClock
from tests.sdk import Unverified
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

T = TypeVar("T")
_VOCABULARIES: dict[str, PromptTokenizer] = {}  # by digest: the next gateway's model has the same, measured already
_TURNS = 5  # of the event loop, in which a task that was woken sends what it has to send


class Place(Protocol):
    """The place of a server."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


@dataclass
class UsageList:
    usages: list[Usage] = field(default_factory=list)

    def record(self, usage: Usage) -> None:
        self.usages.append(usage)


@dataclass
class RunningGateway:
    port: int
    loop: asyncio.AbstractEventLoop
    app: Gateway
    keys: KeyRing
    ledger: UsageList
    clock: ManualClock | LoopClock

    @cached_property
    def openai(self) -> openai.OpenAI:
        return self.client("none")

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=Unverified())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add_tenant(self, tenant_id: str, **values: Any) -> str:
        """Its key."""
        key = new_key(tenant_id, now_s=0.0)
        state = TenantState(tenant_id, tenant_from({"id": tenant_id, **values}), (key.record,))
        self.call(lambda: self.keys.apply([state]))
        return key.secret

    def call(self, function: Any) -> Any:
        """Calls a function in the gateway's own thread and returns its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(GIVE_UP_S)

    def metrics(self) -> str:
        """All that was counted up to now, also for a request whose answer has just been written: the gateway's own
        thread renders it, after it has done with that request."""
        return str(self.call(self.app.recorder.render).decode())

    def advance(self, seconds: float) -> None:
        """Moves the gateway's clock."""
        self.call(lambda: self.clock.advance(seconds))

    def until(self, look: Callable[[], T], is_so: Callable[[T], object] = bool) -> T:
        """Waits for a condition in front of servers that make no reports, and lets time pass: on to the next timer
        whenever nothing is under way to any of them."""

        def pass_time() -> None:
            ways = [replica.upstream for replica in self.app.replicas.values()]
            if not any(way.num_open > way.num_idle for way in ways):
                self.clock.advance_to_next()

        async def run() -> None:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            pass_time()

        def look_on() -> T:
            value = look()
            if not is_so(value):
                asyncio.run_coroutine_threadsafe(run(), self.loop).result(GIVE_UP_S)
            return look()

        return eventually(look_on, is_so)

    def set_in_use(self, replica: Place, is_in: bool) -> None:
        """Takes a replica out, or back in, as probes would. On a `ManualClock` no probe says otherwise."""
        followed = self.app.replicas[f"http://{replica.host}:{replica.port}"]

        def change() -> None:
            followed.health.is_in = is_in
            self.app.replicas.changed(followed)

        self.call(change)

    def states(self) -> list[str]:
        return [str(replica.snapshot.state) for replica in self.app.replicas.values()]

    def is_idle(self) -> bool:
        in_flight = [replica.in_flight for replica in self.app.replicas.values()]
        return self.app.admission.num_open == 0 and not any(in_flight)


class Notes:
    """Notes of the adapters that gateways brought to replicas: what a store keeps."""

    def __init__(self) -> None:
        self.all: set[tuple[str, str]] = set()

    def bring(self, replica: str, name: str) -> bool:
        is_new = (replica, name) not in self.all
        self.all.add((replica, name))
        return is_new

    def forget(self, replica: str, name: str) -> None:
        self.all.discard((replica, name))

    def by_replica(self) -> dict[str, set[str]]:
        return {replica: {name for where, name in self.all if where == replica} for replica, _ in self.all}


@contextlib.contextmanager
def running_gateway(
    *replicas: Replica,
    aliases: Sequence[str] = (),
    pools: dict[str, ModelSettings] | None = None,
    health: HealthSettings | None = None,
    admission: AdmissionSettings | None = None,
    waits: bool = True,
    recorder: GatewayRecorder | None = None,
    notes: Notes | None = None,
    clock: ManualClock | LoopClock | None = None,
    tls: ServerTls | None = None,
    make: Callable[..., Gateway] = Gateway,
    sockets: WebSocketSettings | None = None,
    serve: Callable[..., Server] = Server,
    pipelines: Sequence[Pipeline] = (),
) -> Iterator[RunningGateway]:
    """Runs a gateway in front of `replicas`, or of whatever `pools` name; it waits until all of them are ready."""
    urls = [f"http://{replica.host}:{replica.port}" for replica in replicas]
    pools = pools or {NAME: ModelSettings(replicas=urls, aliases=list(aliases))}
    clock = clock or SlowClock()
    started: list[RunningGateway] = []
    ready = threading.Event()

    async def run() -> None:
        keys, ledger = KeyRing(), UsageList()
        prices = {name: pool.price for name, pool in pools_of(pools).items()}
        services = TenantServices(keys, LocalLimiter(clock.now), Budgets(), ledger, prices, notes or ForgetfulNotes())
        routes = with_pipelines(routes_of(pools), pipelines)
        parts = {"pipelines": PipelineService(pipelines)} if pipelines else {}
        gateway = make(routes, services, Admission(settings=admission), recorder, clock=clock, **parts)
        membership = Membership(gateway.replicas, ReplicaFactory(health, clock), notes.by_replica() if notes else None)
        membership.configure(pools_of(pools))
        server = serve(websockets(gateway, sockets), clock=clock, gate=gateway, upgrades=PATHS)
        listener = bound_socket("127.0.0.1", 0)
        await server.listen(listener, tls=tls)
        stopped = asyncio.Event()
        started.append(
            RunningGateway(listener.getsockname()[1], asyncio.get_running_loop(), gateway, keys, ledger, clock)
        )
        started[0].stop = stopped.set  # type: ignore[attr-defined]
        ready.set()
        await stopped.wait()
        await server.stop(0.0)
        gateway.close()

    thread = threading.Thread(target=lambda: uvloop.run(run()))
    thread.start()
    assert ready.wait(GIVE_UP_S)
    found = started[0]
    try:
        if waits:
            eventually(found.states, lambda states: set(states) <= {"ready"})
        yield found
    finally:
        found.loop.call_soon_threadsafe(found.stop)  # type: ignore[attr-defined]
        thread.join(GIVE_UP_S)
        known = [pool.tokens.prompt_tokenizer for pool in found.app.pools.values()]
        _VOCABULARIES.update({one.digest: one for one in known if one is not None})


@contextlib.contextmanager
def slow_and_fast(
    fast_step_s: float = 0.0,
    health: HealthSettings | None = None,
    begin: Callable[..., contextlib.AbstractContextManager[Replica]] = serving,
    **options: Any,
) -> Iterator[tuple[RunningGateway, Replica, Replica]]:
    """A gateway in front of two replicas, of which the fast one gets nothing until it is set in use: so a stream begins
    at the slow one, and is still there when the test gets round to ending that. `begin`: starts one."""
    with (
        begin(step_s=0.1, **options) as slow,
        begin(step_s=fast_step_s, **options) as fast,
        running_gateway(slow, fast, health=health, clock=ManualClock()) as gateway,
    ):
        gateway.set_in_use(fast, False)
        yield gateway, slow, fast
