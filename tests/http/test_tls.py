"""The listening side over TLS: handshakes, their limits, and certificates that change under open connections."""

import asyncio
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.core.errors import ConfigError
from penstock.http.exchange import Exchange
from penstock.http.limits import ClientLimits
from penstock.http.server import Server, bound_socket
from penstock.http.tls import ServerTls, client_context, expiry
from tests.certificates import Certificate, new_ca
from tests.http.scripted import Client
from tests.http.test_connection import POST, echo
from tests.waiting import eventually_async

LARGE = 3_000_000


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return new_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def other_ca(tmp_path: Path) -> Certificate:
    return new_ca(tmp_path, "other")


class TlsServer:
    def __init__(self, server: Server, tls: ServerTls, port: int) -> None:
        self.server = server
        self.tls = tls
        self.port = port

    async def connect(self, context: ssl.SSLContext) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=context, limit=1 << 20))


def certificate_of(client: Client) -> bytes:
    return client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


def shown_name(client: Client) -> str:
    """The subject of the certificate that the server showed."""
    (((_, name),),) = client.writer.get_extra_info("peercert")["subject"]
    return str(name)


@pytest_asyncio.fixture
async def start(clock, ca, tmp_path):
    started = []

    async def start(app=echo, **limits: float) -> TlsServer:
        files = ca.issue("first")
        server, tls = Server(app, ClientLimits(**limits), clock), ServerTls(str(files.cert), str(files.key))
        sock = bound_socket("127.0.0.1", 0)
        port = sock.getsockname()[1]
        await server.listen(sock, tls=tls)
        started.append(server)
        return TlsServer(server, tls, port)

    yield start
    for server in started:
        await server.stop(0.0)
        assert server.num_connections == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_requests_of_any_size_pass(start, ca):
    place = await start()
    client = await place.connect(ca.context())
    for size in (5, LARGE, 5):
        await client.send(POST.replace(b"length: 5", b"length: %d" % size).removesuffix(b"hello") + b"x" * size)
        response = await client.response()
        assert (response.status, len(response.body)) == (200, len(b"/echo|") + size)
    client.close()
    await eventually_async(lambda: place.server.num_connections, lambda num_open: num_open == 0)


async def test_client_without_the_ca_refuses_by_name_and_takes_no_place(start, other_ca):
    place = await start()
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer certificate"):
        await place.connect(other_ca.context())
    await eventually_async(lambda: place.server.num_connections, lambda num_open: num_open == 0)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_http_1_1_is_agreed_on_and_old_tls_is_not(start, ca):
    place = await start()
    offering = ca.context()
    offering.set_alpn_protocols(["h2", "http/1.1"])
    client = await place.connect(offering)
    assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    client.close()
    old = ca.context()
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await place.connect(old)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_handshake_that_does_not_end_is_a_connection_and_is_dropped(start, clock, ca, said):
    place = await start(max_connections=1, handshake_timeout_s=5.0)
    silent = await Client.connect(place.port)
    await silent.send(said)
    if said.startswith(b"GET"):
        assert not (await silent.reader.read(1 << 16)).startswith(b"HTTP")  # plain HTTP is not spoken here
    else:
        await eventually_async(lambda: place.server.num_connections)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await place.connect(ca.context())  # there is no other place
        clock.advance(5.0)
        assert await silent.ended()
    await eventually_async(lambda: place.server.num_connections, lambda num_open: num_open == 0)
    client = await place.connect(ca.context())
    await client.send(POST)
    assert (await client.response()).status == 200
    client.close()


async def test_stopping_ends_handshakes_and_finishes_streams(start, clock, ca):
    running: list[Exchange] = []
    place = await start(running.append)
    silent, busy = await Client.connect(place.port), await place.connect(ca.context())
    await busy.send(POST)
    await eventually_async(lambda: running)
    running[0].start(200, b"", data=b"half ")
    stopping = asyncio.create_task(place.server.stop(4.0))
    assert await silent.ended()
    running[0].write(b"whole", is_last=True)
    assert (await busy.response()).body == b"half whole"
    assert await stopping == 0


async def test_new_certificate_is_shown_to_new_clients_and_old_streams_go_on(start, ca):
    running: list[Exchange] = []
    place = await start(running.append)
    old = await place.connect(ca.context())
    assert shown_name(old) == "first"
    await old.send(POST)
    await eventually_async(lambda: running)
    running[0].start(200, b"", data=b"half ")
    files = ca.issue("second", days=2)
    place.tls._cert_file, place.tls._key_file = str(files.cert), str(files.key)
    place.tls.reload()
    assert place.tls.expires_at < time.time() + 3 * 86400
    new = await place.connect(ca.context())
    assert shown_name(new) == "second"
    running[0].write(b"whole", is_last=True)
    assert (await old.response()).body == b"half whole"
    place.tls._key_file = str(ca.key)  # of another certificate
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        place.tls.reload()
    another = await place.connect(ca.context())
    assert shown_name(another) == "second"
    for client in (old, new, another):
        client.close()


async def test_renewed_files_are_used_without_a_word_and_broken_ones_are_not(start, ca, caplog):
    place, told = await start(), []
    place.tls.renewed = lambda: told.append(place.tls.expires_at)
    before = await place.connect(ca.context())
    ca.issue("first", days=2)
    after = await place.connect(ca.context())
    assert certificate_of(after) != certificate_of(before)
    assert told == [place.tls.expires_at]
    assert place.tls.expires_at < time.time() + 3 * 86400
    (ca.cert.parent / "first.pem").write_text("half of it")
    for _ in range(2):
        again = await place.connect(ca.context())
        assert certificate_of(again) == certificate_of(after)
        again.close()
    assert len([one for one in caplog.messages if "the certificate stays as it is" in one]) == 1
    for client in (before, after):
        client.close()


async def test_client_that_takes_nothing_is_dropped(start, clock, ca):
    running: list[Exchange] = []
    place = await start(running.append, stall_timeout_s=3.0)
    sock = socket.create_connection(("127.0.0.1", place.port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    sock.setblocking(False)
    _, writer = await asyncio.open_connection(sock=sock, ssl=ca.context(), server_hostname="localhost", limit=1024)
    writer.write(POST)
    await eventually_async(lambda: running)
    running[0].start(200, b"", data=b"x" * (16 << 20))
    running[0].write(b"x" * (1 << 20))  # the layer below took all of the first piece
    (connection,) = place.server._connections
    await eventually_async(lambda: connection._is_paused)
    for _ in range(3):
        clock.advance(3.25)
    await eventually_async(lambda: place.server.num_connections, lambda num_open: num_open == 0)
    assert not running[0].is_open
    writer.transport.abort()


def test_end_of_a_certificate_is_read(ca, tmp_path):
    leaf = ca.issue("leaf", days=30)
    decoded = ssl._ssl._test_decode_cert(str(leaf.cert))  # type: ignore[attr-defined]
    assert expiry(str(leaf.cert)) == ssl.cert_time_to_seconds(decoded["notAfter"])
    chain = tmp_path / "chain.pem"
    chain.write_text(ca.cert.read_text() + leaf.cert.read_text())
    assert expiry(str(chain)) == expiry(str(leaf.cert))
    assert expiry(str(ca.cert)) > expiry(str(leaf.cert))


@pytest.mark.parametrize("content", [None, "", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_files_that_are_no_certificates_are_named(ca, tmp_path, content):
    path = tmp_path / "wrong.pem"
    if content is not None:
        path.write_text(content)
    for use in (
        lambda: ServerTls(str(path), None),
        lambda: expiry(str(path)),
        lambda: client_context(ca_file=str(path)),
        lambda: client_context(cert_file=str(path)),
    ):
        with pytest.raises(ConfigError, match=r"wrong\.pem"):
            use()


def test_key_with_a_password_is_refused_and_not_asked_for(ca, tmp_path):
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", str(ca.key), "-out", str(locked), "-aes128", "-passout", "pass:secret"],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ConfigError, match="has a password"):
        ServerTls(str(ca.cert), str(locked))
