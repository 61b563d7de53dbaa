"""A gateway that has no tenants yet is open to everybody on its machine, but to no foreign web page."""

from __future__ import annotations

import http.client
import json
from contextlib import closing

from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, serving
from tests.waiting import GIVE_UP_S

CHAT = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()


def ask(gateway: RunningGateway, path: str, **headers: str) -> int:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)) as connection:
        connection.request(*(("GET", path) if path == "/v1/models" else ("POST", path, CHAT)), headers=sent)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_no_foreign_page_uses_an_open_gateway() -> None:
    pages = (
        {"origin": "https://evil.example", "content_type": "text/plain"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"host": "rebound.example"},
    )
    with serving() as replica, running_gateway(replica) as gateway:
        own = {"origin": f"http://127.0.0.1:{gateway.port}", "sec_fetch_site": "same-origin"}
        for path in ("/v1/chat/completions", "/v1/models"):
            assert [ask(gateway, path, **page) for page in pages] == [403] * 4
            assert (ask(gateway, path), ask(gateway, path, **own)) == (200, 200)
        key = gateway.add_tenant("acme")  # from now on a key is what counts: no page has one that is not given it
        assert ask(gateway, "/v1/models", authorization=f"Bearer {key}", **pages[0]) == 200
        assert ask(gateway, "/v1/models", **own) == 401
