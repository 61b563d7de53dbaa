"""A gateway before replicas that speak TLS. One gateway plays the replica: it is an OpenAI-compatible server, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.core.errors import ConfigError
from penstock.gateway.membership.factory import replicas_of
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings
from penstock.http.tls import ServerTls
from tests.certificates import Certificate, new_ca
from tests.gateway.running import running_gateway
from tests.server.replica import NAME, Replica


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return new_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def behind(replica_at_hand: Replica, ca: Certificate) -> Iterator[str]:
    """The address of a server with a certificate of that CA."""
    files = ca.issue("behind")
    with running_gateway(replica_at_hand, tls=ServerTls(str(files.cert), str(files.key))) as found:
        yield f"https://127.0.0.1:{found.port}"


def test_https_replicas_are_trusted_by_their_ca_and_by_no_other(behind: str, ca: Certificate, tmp_path: Path) -> None:
    trusts: dict[str, dict[str, Any]] = {
        "good": {"ca_file": str(ca.cert)},
        "bad": {"ca_file": str(new_ca(tmp_path).cert)},
        "unset": {},  # the system's CAs: verification is not something to turn on
    }
    pools = {name: ModelSettings(replicas=[behind], served_as=NAME, **own) for name, own in trusts.items()}
    with running_gateway(pools=pools, waits=False) as gateway:
        states = gateway.until(
            lambda: dict(zip(pools, gateway.states(), strict=True)), lambda now: now["good"] == "ready"
        )
        assert states == {"good": "ready", "bad": "out", "unset": "out"}
        ask = gateway.openai.completions.create
        assert ask(model="good", prompt="the fox", max_tokens=3).choices[0].text
        for model in ("bad", "unset"):
            with pytest.raises(openai.APIStatusError) as refused:
                ask(model=model, prompt="the fox", max_tokens=3)
            assert refused.value.status_code == 503


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"replicas": ["http://x"], "ca_file": "ca.pem"}, "models.m.ca_file"),
        ({"replicas": ["http://x"], "server_name": "x.svc"}, "models.m.server_name"),
        ({"replicas": ["https://x"], "client_key": "key.pem"}, "models.m.client_key"),
        ({"replicas": ["https://x"], "ca_file": "/nowhere/ca.pem"}, "models.m.ca_file"),
        ({"replicas": ["https://x"], "client_cert": "/nowhere/cert.pem"}, "models.m.client_cert"),
    ],
)
def test_tls_settings_that_mean_nothing_are_refused(values: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replicas_of({"m": ModelSettings(**values)})
    assert refused.value.param == param


@pytest.mark.parametrize("values", [{"tls_key": "key.pem"}, {"admin_tls": True}])
def test_tls_needs_a_certificate(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs a certificate"):
        GatewaySettings(**values).tls()


def test_admin_port_has_tls_where_others_can_reach_it() -> None:
    def has_tls(**values: Any) -> bool:
        return GatewaySettings(**values).has_admin_tls

    assert not has_tls(admin_host="0.0.0.0")
    assert has_tls(tls_cert="cert.pem", admin_host="0.0.0.0")
    assert not has_tls(tls_cert="cert.pem")
    assert has_tls(tls_cert="cert.pem", admin_tls=True)
    assert not has_tls(tls_cert="cert.pem", admin_host="0.0.0.0", admin_tls=False)
