"""`penstock gateway` with TLS as a user starts it: both ports, and certificates that are renewed."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.settings.gateway import ModelSettings
from tests.certificates import Certificate, new_ca
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.cli.real_server import tiny_server, write_tiny_model
from tests.gateway.running import running_gateway
from tests.server.replica import Replica, serving
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "a river"}],
    "max_tokens": 5,
    "ignore_eos": True,
}
EXPIRY = re.compile(rb"^penstock_gateway_tls_certificate_expiry_timestamp_seconds (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving(step_s=0.05) as found:
        yield found


@pytest.fixture
def ca(tmp_path: Path) -> Certificate:
    (tmp_path / "tls").mkdir()
    return new_ca(tmp_path / "tls")


@contextlib.contextmanager
def tls_gateway(directory: Path, replica: Replica, ca: Certificate, **settings: Any) -> Iterator[RealGateway]:
    files = ca.issue("gateway", days=30)
    tls = {"tls_cert": str(files.cert), "tls_key": str(files.key)}
    with real_gateway(directory, replica, trusts=ca.context(), **tls, **settings) as found:
        yield found


def shown(gateway: RealGateway) -> bytes | None:
    """The certificate that a new client sees."""
    with contextlib.closing(gateway.connect()) as connection:
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        return connection.sock.getpeercert(binary_form=True)


def expires_at(gateway: RealGateway) -> float:
    found = EXPIRY.search(gateway.ask("GET", "/metrics", url=gateway.admin_url)[1])
    assert found is not None
    return float(found[1])


def test_renewed_certificate_is_served_while_an_old_stream_goes_on(
    tmp_path: Path, replica: Replica, ca: Certificate
) -> None:
    with tls_gateway(tmp_path, replica, ca, admin_port=0, admin_tls=True) as gateway:
        assert gateway.url.startswith("https://")
        assert gateway.admin_url is not None
        assert gateway.admin_url.startswith("https://")
        before, old = shown(gateway), expires_at(gateway)
        with contextlib.closing(gateway.connect()) as connection:
            body = json.dumps(CHAT | {"max_tokens": 60, "stream": True})
            connection.request("POST", "/v1/chat/completions", body)
            stream = connection.getresponse()
            assert stream.readline()
            ca.issue("gateway", days=60)
            gateway.process.send_signal(signal.SIGHUP)
            eventually(lambda: shown(gateway), lambda now: now != before)
            assert expires_at(gateway) > old + 29 * 86400
            assert stream.read().rstrip().endswith(b"data: [DONE]")
        after = shown(gateway)
        (tmp_path / "tls" / "gateway.key").write_text("no key")
        gateway.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the certificates stay as they are: " in gateway.log.read_text())
        assert shown(gateway) == after
        assert gateway.ask("POST", "/v1/chat/completions", CHAT)[0] == 200


def test_replica_with_tls_is_used_by_gateways_that_have_a_certificate(tmp_path: Path, ca: Certificate) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    write_tiny_model(model)
    files, own = ca.issue("replica"), ca.issue("gateway")
    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--client-ca", str(ca.cert))
    with tiny_server(model, *flags) as server:
        assert server.url.startswith("https://")
        good = ModelSettings(
            replicas=[server.url],
            served_as=server.model,
            ca_file=str(ca.cert),
            client_cert=str(own.cert),
            client_key=str(own.key),
        )
        pools = {"good": good, "bad": replace(good, client_cert=None, client_key=None)}
        with running_gateway(pools=pools, waits=False) as gateway:
            eventually(gateway.states, lambda states: states == ["ready", "out"])
            (found, _) = gateway.app.replicas.values()
            assert found.relays  # it is known for one of penstock's, and its streams can be carried on
            answer = gateway.openai.completions.create(model="good", prompt="the fox", max_tokens=3)
            assert answer.usage is not None
            assert answer.usage.completion_tokens
            before = presented(server.port, ca, own)
            ca.issue("replica", days=60)
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: presented(server.port, ca, own), lambda now: now != before)
            assert gateway.openai.completions.create(model="good", prompt="the fox", max_tokens=3).usage is not None


def presented(port: int, ca: Certificate, own: Certificate) -> bytes | None:
    """The certificate that a replica shows to a new client, which has one too."""
    context = ca.context()
    context.load_cert_chain(own.cert, own.key)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return connection.getpeercert(binary_form=True)
