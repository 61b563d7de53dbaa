"""The protocol's two ports in front of an application that runs in a loop of another thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc
import tritonclient.http

from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.server import App, BodyGate, Server, bound_socket
from penstock.oip.calls import Calls, CanServe
from penstock.oip.over_grpc import GrpcPort, OverGrpc
from penstock.oip.over_http import OverHttp
from penstock.oip.tensor_calls import RepositoryCalls, TensorCalls
from tests.waiting import GIVE_UP_S

MAX_BODY_BYTES = 8 << 20


@dataclass
class Ports:
    loop: asyncio.AbstractEventLoop
    grpc_server: OverGrpc
    http: int
    grpc: int

    @property
    def grpc_client(self) -> tritonclient.grpc.InferenceServerClient:
        return tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.grpc}")

    @property
    def http_client(self) -> tritonclient.http.InferenceServerClient:
        return tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.http}", network_timeout=GIVE_UP_S)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(GIVE_UP_S)


@contextlib.contextmanager
def opened(
    loop: asyncio.AbstractEventLoop,
    app: App,
    gate: BodyGate | None = None,
    can_serve: CanServe | None = None,
    clock: TimerClock = LOOP_CLOCK,
    tensors: TensorCalls | None = None,
    repository: RepositoryCalls | None = None,
    **where: Any,
) -> Iterator[Ports]:
    """`clock`: of the gRPC port, `where`: more of its settings."""

    async def start() -> tuple[OverGrpc, Server, int]:
        calls = Calls(app, gate, can_serve, max_body_bytes=MAX_BODY_BYTES, tensors=tensors, repository=repository)
        grpc = OverGrpc(calls, GrpcPort("127.0.0.1", 0, **where), clock)
        await grpc.listen()
        front = OverHttp(app, calls, gate)
        http, listener = Server(front, gate=front), bound_socket("127.0.0.1", 0)
        await http.listen(listener)
        return grpc, http, listener.getsockname()[1]

    grpc, http, port = asyncio.run_coroutine_threadsafe(start(), loop).result(GIVE_UP_S)
    ports = Ports(loop, grpc, port, grpc.port)
    try:
        yield ports
    finally:
        ports.run(grpc.stop(0.0))
        ports.run(http.stop(0.0))
