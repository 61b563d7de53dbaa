"""An ASGI application behind the gateway's server; a replica's server in `tests/cli/test_http_server.py` is one."""

from __future__ import annotations

import asyncio

from penstock.api.asgi import Receive, Scope, Send
from penstock.http.asgi import AsgiApp
from penstock.http.exchange import Exchange
from penstock.http.message import Request


class Far:
    """The channel of a client that is not on this machine."""

    peer = "10.0.0.1"

    def send(self, data: bytes) -> None: ...
    def answered(self, close: bool) -> None: ...
    def drop(self) -> None: ...


async def test_a_client_that_goes_away_at_once_is_not_taken_for_one_of_this_machine() -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"])

    exchange = Exchange(Far(), Request(b"POST", b"/v1/penstock/drain", {}, b""), True, True)
    AsgiApp(app)(exchange)
    exchange.lost()
    await asyncio.sleep(0)
    assert seen == [("10.0.0.1", 0)]
    assert exchange.peer == "0.0.0.0"
