"""`penstock doctor --url`: a server that runs, as a client sees it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.doctor.endpoint import Endpoint, endpoint
from penstock.doctor.findings import Finding
from penstock.gateway.settings.gateway import ModelSettings
from penstock.http.tls import ServerTls
from tests.certificates import Certificate, new_ca
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return new_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def gateway(replica: Replica, ca: Certificate) -> Iterator[RunningGateway]:
    files = ca.issue("gateway", good_for="DNS:llm.example")
    with running_gateway(replica, tls=ServerTls(str(files.cert), str(files.key))) as found:
        yield found


@pytest.fixture(scope="module")
def target(gateway: RunningGateway, ca: Certificate) -> Endpoint:
    key = gateway.add_tenant("acme")
    url = f"https://127.0.0.1:{gateway.port}"
    return Endpoint(url, key, None, str(ca.cert), "llm.example", GIVE_UP_S)


def look(target: Endpoint) -> tuple[list[str], Finding]:
    """Names of the checks that are made, and the last finding."""
    found = list(endpoint(target))
    assert [one.verdict for one in found[:-1]] == ["ok"] * (len(found) - 1)
    return [one.name for one in found], found[-1]


def test_ready_gateway_lists_its_models_and_answers(target: Endpoint) -> None:
    names, last = look(target)
    assert names == ["ready", "models", "answer"]
    assert (last.verdict, last.says) == ("ok", f"{NAME} made 4 tokens")
    assert look(replace(target, model=NAME))[1].verdict == "ok"


@pytest.mark.parametrize(
    ("changed", "names", "says"),
    [
        ({"key": None}, ["ready", "models"], "401"),
        ({"key": "psk_wrong"}, ["ready", "models"], "401"),
        ({"model": "other"}, ["ready", "models", "answer"], "there is no model 'other'"),
        ({"server_name": None}, ["endpoint"], "IP address mismatch"),
        ({"ca_file": None}, ["endpoint"], "unable to get local issuer certificate"),
        ({"ca_file": "/nowhere.pem"}, ["endpoint"], "/nowhere.pem"),
    ],
)
def test_failure_is_said_in_the_line_of_its_check(
    target: Endpoint, changed: dict[str, str | None], names: list[str], says: str
) -> None:
    found, last = look(replace(target, **changed))  # type: ignore[arg-type]
    assert (found, last.verdict) == (names, "fail")
    assert says in last.says


def test_gateway_without_a_replica_is_not_ready() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as nobody,
        running_gateway(pools={NAME: ModelSettings(replicas=[_url(nobody)])}, waits=False) as empty,
    ):
        names, last = look(Endpoint(empty.url, timeout_s=GIVE_UP_S))
        assert names == ["ready"]
        assert "503" in last.says


def test_command_ends_with_1_where_nobody_listens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = _url(listener)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--url", url])
    assert ended.value.code == 1
    assert "FAIL  endpoint" in capsys.readouterr().out


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
