"""Pages of other origins: who is told that it may use the API."""

from __future__ import annotations

import pytest

from penstock.http.cors import Cors
from penstock.http.exchange import Exchange
from penstock.http.message import Request

PAGE = b"https://chat.example"
ASKS = {b"access-control-request-method": b"POST", b"access-control-request-headers": b"authorization, x-own"}


class Browser:
    peer = "127.0.0.1"

    def __init__(self) -> None:
        self.sent = b""

    def send(self, data: bytes) -> None:
        self.sent += data

    def answered(self, close: bool) -> None:
        pass

    def drop(self) -> None:
        pass


def answered(
    *origins: str, origin: bytes | None = PAGE, method: bytes = b"POST", path: bytes = b"/v1/models", **headers: bytes
) -> bytes:
    """The head of what the browser gets."""
    sent = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    sent |= {b"origin": origin} if origin is not None else {}
    sent |= ASKS if method == b"OPTIONS" else {}
    browser = Browser()
    exchange = Exchange(browser, Request(method, path, sent, b""), True, True)
    if not Cors(origins).answer(exchange):
        exchange.respond(200, b"content-type: text/plain\r\n", b"served")
    return browser.sent


@pytest.mark.parametrize("origins", [["https://chat.example"], ["https://CHAT.example/"], ["*"], ["http://a", "*"]])
def test_a_page_that_is_allowed_may_ask_and_read(origins: list[str]) -> None:
    preflight = answered(*origins, method=b"OPTIONS")
    assert preflight.startswith(b"HTTP/1.1 204 ")
    assert b"access-control-allow-origin: https://chat.example\r\nvary: origin\r\n" in preflight
    assert b"access-control-allow-headers: authorization, x-own\r\n" in preflight
    assert b"access-control-allow-methods: GET, POST, DELETE\r\n" in preflight
    served = answered(*origins)
    assert b"access-control-allow-origin: https://chat.example\r\n" in served
    assert b"access-control-expose-headers: x-request-id," in served
    assert served.endswith(b"\r\n\r\nserved")


@pytest.mark.parametrize("method", [b"OPTIONS", b"POST"])
@pytest.mark.parametrize(
    "origin", [b"https://evil.example", b"http://chat.example", b"https://chat.example:8443", b"null", None]
)
def test_others_are_told_nothing(method: bytes, origin: bytes | None) -> None:
    served = answered("https://chat.example", origin=origin, method=method)
    assert b"access-control" not in served
    assert served.endswith(b"served")


@pytest.mark.parametrize("path", [b"/", b"/admin/v1/tenants", b"/metrics", b"/v1"])
def test_what_is_no_api_is_not_shared(path: bytes) -> None:
    assert b"access-control" not in answered("*", path=path, method=b"OPTIONS")


def test_no_origins_are_no_sharing() -> None:
    assert Cors.of([]) is None
