"""Fetches for clients: what they may reach, how much of it, and how long."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.core.errors import InvalidImage
from penstock.http.outside import Outside
from tests.certificates import new_ca

MOST = 10_000
Reply = Callable[[bytes], bytes]


def reply(body: bytes, *headers: str, status: str = "200 OK", has_length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if has_length else [])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def server(answer: Reply, tls: ssl.SSLContext | None = None, *, hangs: bool = False) -> AsyncIterator[int]:
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await reader.readuntil(b"\r\n\r\n")))
        if hangs:
            await over.wait()
        writer.close()

    started = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield started.sockets[0].getsockname()[1]
    finally:
        over.set()
        started.close()


def outside(port: int, *, timeout_s: float = 60.0, tls: ssl.SSLContext | None = None) -> Outside:
    """This machine's first address alone may be reached."""
    hosts = [f"*:{port}", "*"]
    return Outside(hosts, MOST, timeout_s, is_allowed=lambda address: address == "127.0.0.1", tls=tls)


async def refused(answer: bytes, reason: str = "fetch") -> str:
    async with server(lambda asked: answer) as port:
        with pytest.raises(InvalidImage) as error:
            await outside(port).fetch(f"http://127.0.0.1:{port}/a.png")
    assert error.value.reason == reason
    return error.value.message


async def test_a_file_and_what_is_asked_for_it() -> None:
    asked = []

    def answer(head: bytes) -> bytes:
        asked.append(head)
        return reply(b"bytes", "Content-Type: text/html")

    async with server(answer) as port:
        assert await outside(port).fetch(f"http://127.0.0.1:{port}/a/b.png?c=d#e") == b"bytes"
    assert asked[0].startswith(b"GET /a/b.png?c=d HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % port)
    assert b"Accept-Encoding: identity" in asked[0]


@pytest.mark.parametrize(
    "answer",
    [
        reply(b"bytes", has_length=False),
        reply(b"5\r\nbytes\r\n0\r\n\r\n", "Transfer-Encoding: chunked", has_length=False),
        reply(b"bytes", "Content-Encoding: identity"),
    ],
)
async def test_every_framing(answer: bytes) -> None:
    async with server(lambda asked: answer) as port:
        assert await outside(port).fetch(f"http://127.0.0.1:{port}/") == b"bytes"


@pytest.mark.parametrize(
    "begun", ["HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"]
)
async def test_headers_are_bounded_before_a_body_and_behind_it(begun: str) -> None:
    assert "headers are too long" in await refused(begun.encode() + b"X: " + b"a" * (1 << 20))


async def test_redirects_are_followed_a_few_times() -> None:
    def answer(head: bytes) -> bytes:
        number = int(head.split(b" ")[1].rpartition(b"/")[2])
        return reply(b"", f"Location: /{number - 1}", status="302 Found") if number else reply(b"bytes")

    async with server(answer) as port:
        assert await outside(port).fetch(f"http://127.0.0.1:{port}/3") == b"bytes"
        with pytest.raises(InvalidImage, match="redirects"):
            await outside(port).fetch(f"http://127.0.0.1:{port}/4")


@pytest.mark.parametrize(
    "place",
    [
        "http://127.0.0.2/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.2]/",
        "file:///etc/passwd",
        "http://127.0.0.1:1/",
        "//127.0.0.2/x",
        "http://user@127.0.0.1/",
    ],
)
async def test_a_redirect_to_elsewhere_is_checked_as_the_first_place_was(place: str) -> None:
    async with server(lambda asked: reply(b"", f"Location: {place}", status="301 Moved")) as port:
        with pytest.raises(InvalidImage) as error:
            await outside(port).fetch(f"http://127.0.0.1:{port}/")
    assert error.value.reason in ("address", "remote", "url", "fetch")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://0/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
        "https://192.168.0.1/",
    ],
)
async def test_no_address_that_is_not_public_is_connected_to(url: str) -> None:
    with pytest.raises(InvalidImage) as error:
        await Outside(["*"], MOST, 60.0).fetch(url)
    assert error.value.reason == "address"


async def test_a_name_that_leads_to_this_machine_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are resolved once, and what is connected to is the address that was checked."""
    async with server(lambda asked: reply(b"bytes")) as port:
        loop, names = asyncio.get_running_loop(), []
        resolved = [["127.0.0.1", "127.0.0.2"], ["127.0.0.1"], ["127.0.0.2"]]
        connect = asyncio.open_connection

        async def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
            names.append(host)
            return [(2, 1, 6, "", (address, port)) for address in resolved.pop(0)]

        async def connecting(host: str, port: int, **options: object) -> object:
            assert host == "127.0.0.1"
            monkeypatch.undo()
            return await connect(host, port, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(type(loop), "getaddrinfo", staticmethod(getaddrinfo))
        with pytest.raises(InvalidImage, match="address"):
            await outside(port).fetch(f"http://images.example:{port}/")
        monkeypatch.setattr(asyncio, "open_connection", connecting)
        assert await outside(port).fetch(f"http://images.example:{port}/") == b"bytes"
        assert names == ["images.example"] * 2


async def test_answers_that_are_no_file() -> None:
    assert "404" in await refused(reply(b"", status="404 Not Found"))
    assert "302" in await refused(reply(b"", status="302 Found"))
    assert "broke off" in await refused(reply(b"bytes").replace(b"Length: 5", b"Length: 9"))
    assert "compressed" in await refused(reply(b"bytes", "Content-Encoding: gzip"))
    await refused(b"SSH-2.0-OpenSSH\r\n")
    await refused(b"")
    await refused(b"HTTP/1.1 200 OK\r\n" + b"A: " + b"a" * 200_000)


async def test_no_more_is_read_than_may_be() -> None:
    await refused(reply(bytes(MOST + 1)), "bytes")
    await refused(reply(bytes(MOST + 1), has_length=False), "bytes")
    await refused(reply(b"").replace(b"Length: 0", b"Length: 99999999999"), "bytes")


async def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    async with server(lambda asked: b"HTTP/1.1 200 OK\r\n", hangs=True) as port:
        with pytest.raises(InvalidImage, match=r"within 0\.05 s"):
            await outside(port, timeout_s=0.05).fetch(f"http://127.0.0.1:{port}/")


async def test_certificates_are_checked_and_good_for_the_name(tmp_path: Path) -> None:
    ca = new_ca(tmp_path)
    own = ca.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    async with server(lambda asked: reply(b"bytes"), context) as port:
        url = f"https://127.0.0.1:{port}/"
        assert await outside(port, tls=ca.context()).fetch(url) == b"bytes"
        with pytest.raises(InvalidImage, match="certificate"):
            await outside(port).fetch(url)


async def test_nobody_listens() -> None:
    async with server(lambda asked: b"") as port:
        pass
    with pytest.raises(InvalidImage, match="could not be fetched"):
        await outside(port).fetch(f"http://127.0.0.1:{port}/")
