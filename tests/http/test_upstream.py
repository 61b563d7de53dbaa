import asyncio
import ssl
from functools import partial

import pytest
import uvloop

from penstock.core.errors import ConfigError
from penstock.http.ask import ask
from penstock.http.call import Call, Failure, FailureKind
from penstock.http.message import ResponseHead
from penstock.http.tls import client_context
from penstock.http.upstream import Upstream
from penstock.http.upstream_connection import UpstreamConnection
from tests.certificates import new_ca
from tests.waiting import eventually_async


class Collecting:
    """A receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = b""

    def head(self, head: ResponseHead) -> None:
        self.status = head.status

    def data(self, data: bytes, is_last: bool) -> None:
        self.body += data
        if is_last:
            self.over.set_result(None)

    def failed(self, failure: Failure) -> None:
        self.over.set_result(failure)


@pytest.fixture
def ca(tmp_path):
    return new_ca(tmp_path)


async def test_providers_are_reached_over_tls_and_their_certificates_checked(ca):
    files = ca.issue("provider")
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(files.cert, files.key)
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=theirs)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"

    trusting = Upstream.from_url(url, tls=client_context(str(ca.cert)))
    for _ in range(2):
        got = Collecting()
        trusting.send(b"POST", b"/v1/x", b"authorization: Bearer k\r\n", b"", got)
        assert await got.over is None
        assert (got.status, got.body) == (200, b"ok")
    assert trusting.num_idle == 1
    assert b"host: localhost:" in heads[0]
    assert b"authorization: Bearer k" in heads[0]

    doubting = Upstream.from_url(url)
    got = Collecting()
    doubting.send(b"POST", b"/", b"", b"", got)
    failure = await got.over
    assert (failure.kind, failure.was_sent) == (FailureKind.REFUSED, False)
    assert "certificate verify failed: unable to get local issuer certificate" in failure.message
    trusting.close()
    doubting.close()
    server.close()


async def test_certificate_must_be_good_for_the_name_that_is_set_and_not_for_the_address(ca):
    files = ca.issue("pods", good_for="DNS:replicas.serving.svc")
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(files.cert, files.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=theirs)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for name, is_good in ((None, False), ("replicas.serving.svc", True), ("other.serving.svc", False)):
        way, got = Upstream.from_url(url, tls=client_context(str(ca.cert)), server_name=name), Collecting()
        way.send(b"GET", b"/", b"", b"", got)
        assert (await got.over is None) == is_good
        way.close()
        asking = partial(ask, url, "GET", "/", timeout_s=60.0, tls=ca.context(), server_name=name)
        if is_good:
            assert (await asyncio.to_thread(asking)).status == 200
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.to_thread(asking)
    server.close()


async def test_servers_that_ask_for_a_certificate_are_shown_one(ca):
    files, own = ca.issue("server"), ca.issue("gateway")
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca.cert)
    theirs.verify_mode = ssl.CERT_REQUIRED
    theirs.load_cert_chain(files.cert, files.key)
    seen: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (((_, name),),) = writer.get_extra_info("peercert")["subject"]
        seen.append(name)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=theirs)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for tls, is_let_in in (
        (client_context(str(ca.cert), str(own.cert), str(own.key)), True),
        (client_context(str(ca.cert)), False),
    ):
        way, got = Upstream.from_url(url, tls=tls), Collecting()
        way.send(b"GET", b"/", b"", b"", got)
        assert (await got.over is None) == is_let_in
        way.close()
    assert seen == ["gateway"]
    server.close()


async def test_closing_the_pool_fails_what_is_in_flight():
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    way = Upstream("127.0.0.1", server.sockets[0].getsockname()[1])
    connected, connecting = Collecting(), Collecting()
    way.send(b"POST", b"/", b"", b"", connected)
    await eventually_async(lambda: way._connections)
    way.send(b"POST", b"/", b"", b"", connecting)
    way.close()
    assert (await connected.over).kind is FailureKind.CLOSED
    assert (await connecting.over).kind is FailureKind.REFUSED
    await eventually_async(lambda: way.num_open, lambda num_open: num_open == 0)
    server.close()


async def test_cancelled_calls_are_heard_of_no_more():
    way = Upstream("127.0.0.1", 1)
    got = Collecting()
    way.send(b"POST", b"/", b"", b"", got).cancel()
    await eventually_async(lambda: way.num_open, lambda num_open: num_open == 0)
    assert not got.over.done()


class Hasty(Upstream):
    """Gives its call up in the moment in which the connection is there."""

    call: Call

    def opened(self, connection: UpstreamConnection) -> None:
        super().opened(connection)
        self.call.cancel()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_that_is_given_up_while_it_is_made_is_not_counted_for_ever(loop_factory):
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        upstream = Hasty("127.0.0.1", server.sockets[0].getsockname()[1])
        upstream.call = upstream.send(b"GET", b"/", b"", b"", Collecting())
        assert upstream.num_open == 1
        await eventually_async(lambda: upstream.num_open == 0)
        server.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://"])
def test_only_http_addresses_are_upstreams(url):
    with pytest.raises(ConfigError, match="not the address"):
        Upstream.from_url(url)
