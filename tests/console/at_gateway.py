"""A console in front of a real door, in the door's own thread and on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.console.at_gateway import ConsoleAtGateway
from penstock.console.feed import Feed
from penstock.console.gateway_source import GatewaySource
from penstock.gateway.admin.guard import Guard
from penstock.http.server import Server, bound_socket
from penstock.tenancy.admins import AdminKey, AdminRing
from penstock.tenancy.budgets import Budgets
from tests.gateway.running import RunningGateway
from tests.waiting import GIVE_UP_S


@dataclass
class Console:
    port: int
    feed: Feed
    loop: asyncio.AbstractEventLoop

    def get(self, path: str, key: str | None = None, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and body, as JSON where it is JSON."""
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GIVE_UP_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            content = answer.read()
        is_json = answer.headers.get("content-type") == "application/json"
        return answer.status, answer.headers, json.loads(content) if is_json else content

    @contextlib.contextmanager
    def events(self, key: str | None = None) -> Iterator[Iterator[tuple[str, Any]]]:
        """Each event's kind and document, as they come; it ends when the server ends it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GIVE_UP_S)
        with contextlib.closing(connection):
            connection.request("GET", "/console/v1/feed", headers={"authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield parsed(answer)


def parsed(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    while line := answer.readline():
        kind = line.removeprefix(b"event: ").strip().decode()
        document = json.loads(answer.readline().removeprefix(b"data: "))
        assert answer.readline() == b"\n"
        yield kind, document


@contextlib.contextmanager
def console(running_gateway: RunningGateway, *admins: AdminKey) -> Iterator[Console]:
    """Its feed ticks when a test says so, or by itself once it is started."""

    async def start() -> tuple[Server, Feed, int]:
        ring = AdminRing()
        ring.apply(admins)
        feed = Feed(GatewaySource(running_gateway.app, running_gateway.keys, Budgets()), period_s=0.02)
        running_gateway.app.recorder.listeners.append(feed)
        server = Server(
            ConsoleAtGateway(feed, Guard(ring, running_gateway.keys, is_loopback=True), running_gateway.keys)
        )
        listener = bound_socket("127.0.0.1", 0)
        await server.listen(listener)
        return server, feed, listener.getsockname()[1]

    async def stop() -> None:
        running_gateway.app.recorder.listeners.remove(feed)
        feed.close()
        await server.stop(0.1)

    server, feed, port = asyncio.run_coroutine_threadsafe(start(), running_gateway.loop).result(GIVE_UP_S)
    try:
        yield Console(port, feed, running_gateway.loop)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), running_gateway.loop).result(GIVE_UP_S)
