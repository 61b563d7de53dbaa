import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from penstock.http.limits import ClientLimits, UpstreamLimits
from penstock.http.server import App, BodyGate, Server, bound_socket
from penstock.http.uploads import Uploads
from penstock.http.upstream import Upstream
from tests.clocks import ManualClock
from tests.http.bare_gateway import BareGateway
from tests.http.scripted import Client, Script, ScriptedUpstream
from tests.waiting import eventually_async


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def clock() -> ManualClock:
    """The time of every server and every upstream of a test: it stands still until the test moves it."""
    return ManualClock()


@pytest_asyncio.fixture
async def serve(
    clock: ManualClock,
) -> AsyncIterator[Callable[..., Awaitable[tuple[Server, Callable[[], Awaitable[Client]]]]]]:
    """Starts servers; gives each with a function that connects to it. After the test nothing of it may be left."""
    servers = []

    async def start(
        app: App, *, gate: BodyGate | None = None, uploads: Uploads | None = None, **limits: float
    ) -> tuple[Server, Callable[[], Awaitable[Client]]]:
        server = Server(app, ClientLimits(**limits), clock, gate=gate, uploads=uploads)  # type: ignore[arg-type]
        servers.append(server)
        sock = bound_socket("127.0.0.1", 0)
        await server.listen(sock)
        port = sock.getsockname()[1]
        return server, lambda: Client.connect(port)

    yield start
    for server in servers:
        await server.stop(0.0)
        assert server.num_connections == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Stand:
    """A gateway between a client and scripted upstreams."""

    def __init__(self, gateway: BareGateway, port: int, upstreams: Sequence[ScriptedUpstream]) -> None:
        self.gateway = gateway
        self.port = port
        self.upstreams = upstreams

    async def client(self) -> Client:
        return await Client.connect(self.port)


@pytest_asyncio.fixture
async def stand(clock: ManualClock) -> AsyncIterator[Callable[..., Awaitable[Stand]]]:
    started: list[Stand] = []

    async def start(
        *scripts: Script, client_limits: ClientLimits | None = None, upstream_limits: UpstreamLimits | None = None
    ) -> Stand:
        upstreams = [await ScriptedUpstream.start(script) for script in scripts]
        ways = [Upstream("127.0.0.1", upstream.port, limits=upstream_limits, clock=clock) for upstream in upstreams]
        gateway = BareGateway(ways, client_limits, clock)
        gateway.outcomes = []
        started.append(Stand(gateway, await gateway.listen(), upstreams))
        return started[-1]

    yield start
    for one in started:
        await one.gateway.stop(0.0)
        for upstream in one.upstreams:
            await upstream.stop()
        for way in one.gateway.upstreams:
            await eventually_async(lambda: (way.num_open, way.num_idle), lambda counts: counts == (0, 0))  # noqa: B023
        assert one.gateway.server.num_connections == 0
