"""The systemd units: systemd accepts them, penstock accepts their commands, and a stop leaves time for the drain."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import gateway_process, replicas, sd_notify, serve, supervisor
from penstock.cli.main import parser
from penstock.core.settings import ServerSettings
from tests.cli.real_gateway import real_gateway
from tests.cli.real_server import tiny_server, write_tiny_model
from tests.server.replica import serving

UNITS = sorted((Path(__file__).parents[2] / "deploy/systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")


def values(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def by_name(name: str) -> Path:
    return next(unit for unit in UNITS if unit.name == name)


@pytest.mark.skipif(ANALYZE is None, reason="there is no systemd-analyze here: apt-get install systemd")
def test_systemd_accepts_them(tmp_path: Path) -> None:
    assert len(UNITS) == 3
    for unit in UNITS:  # the program is somewhere else on this machine
        text = unit.read_text().replace("/opt/penstock/bin/penstock", sys.executable)
        (tmp_path / unit.name).write_text(text)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    command = [str(ANALYZE), "verify", "--man=no", "--generators=no", *paths]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, [line for line in found.stderr.splitlines() if "penstock-" in line]) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_penstock_accepts_their_commands(unit: Path) -> None:
    (command,) = values(unit, "ExecStart")
    program, *words = shlex.split(command.replace("%i", "a"))
    assert Path(program).name == "penstock"
    arguments = parser().parse_args(words)  # a flag that there is not ends the test
    assert arguments.config.is_relative_to("/etc/penstock")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_whatever_ends_them_they_are_started_again_and_may_write_to_their_state_alone(unit: Path) -> None:
    expected = {
        "Type": "notify",
        "Restart": "always",
        "StartLimitIntervalSec": "0",
        "KillSignal": "SIGTERM",
        "KillMode": "process" if unit.name == "penstock-gateway.service" else "mixed",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "StateDirectory": "penstock",
        "Environment": "PENSTOCK_HOME=/var/lib/penstock",
        "EnvironmentFile": "-/etc/penstock/penstock.env",
    }
    assert {name: values(unit, name) for name in expected} == {name: [value] for name, value in expected.items()}
    assert int(values(unit, "LimitNOFILE")[0]) >= 65536


def test_a_stop_leaves_time_for_the_drain() -> None:
    stop_s = {unit.name: float(values(unit, "TimeoutStopSec")[0]) for unit in UNITS}
    replica_s = ServerSettings().drain_timeout_s + serve._GOODBYE_S
    assert stop_s["penstock-gateway.service"] > supervisor._STOP_S > gateway_process._DRAIN_S
    assert stop_s["penstock-replica@.service"] > replica_s
    assert stop_s["penstock-serve.service"] > supervisor._STOP_S + replicas._STOP_S


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_socket_that_systemd_names_is_told(
    is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name if is_abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if is_abstract else name)
        sd_notify.notify(sd_notify.READY)
        assert listener.recv(64) == b"READY=1"


@pytest.mark.parametrize("name", [None, "", "relative", "/there/is/none"])
def test_without_a_socket_nobody_is_told(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if name is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", name)
    sd_notify.notify(sd_notify.READY)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket that systemd would listen at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.mark.slow
def test_a_gateway_tells_when_it_listens_and_when_it_stops(tmp_path: Path, told: socket.socket) -> None:
    with serving() as replica, real_gateway(tmp_path, replica) as gateway:
        assert told.recv(64) == b"READY=1"
        assert gateway.ask("GET", "/health")[0] == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert told.recv(64) == b"STOPPING=1"


@pytest.mark.slow
def test_a_replica_tells_when_its_model_is_loaded_and_when_it_stops(tmp_path: Path, told: socket.socket) -> None:
    write_tiny_model(tmp_path)
    with tiny_server(tmp_path) as server:
        assert told.recv(64) == b"READY=1"
        assert server.status("/ready") == 200
    assert told.recv(64) == b"STOPPING=1"
