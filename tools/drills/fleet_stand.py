"""A fleet for drills and tests: a real controller, its gateway and its replicas, each a process, seen from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from tests.waiting import eventually

from penstock.fleet.policy.decision import Decision
from penstock.hub.home import penstock_home
from penstock.tenancy.fleet import FleetReplica
from penstock.tenancy.store import open_store

POOL = "tiny"
CHAT = "/v1/chat/completions"
PATIENCE_S = 240.0  # for a start on a busy machine


@dataclass
class RealFleet:
    directory: Path
    model: str  # a directory, or a name
    pool: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)  # of the fleet
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.directory / "fleet.yaml"
        self.home = self.directory / "home"
        fleet = {"lease_s": 2.0, "every_s": 0.2, "gateway": {"port": 0}, **self.settings}
        self.config.write_text(json.dumps({**fleet, "pools": {POOL: {"model": self.model, **self.pool}}}))
        self.home.mkdir()
        with contextlib.suppress(FileNotFoundError):
            kernels = (penstock_home() / "kernels").resolve(strict=True)  # compiled once for all tests
            (self.home / "kernels").symlink_to(kernels)
        self.store = open_store(f"sqlite:///{self.home / 'penstock.db'}")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "penstock.cli.main", *words]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PENSTOCK_HOME": str(self.home)}

    def start_controller(self) -> subprocess.Popen[bytes]:
        command = self.command("fleet", "--config", str(self.config))
        with open(self.directory / "controllers.log", "ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.controllers.append(process)
        return process

    def run(self, *words: str) -> str:
        done = subprocess.run(self.command(*words), env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def replicas(self) -> dict[str, FleetReplica]:
        """Replicas by id, as the store has them."""
        return {one.id: one for one in self.store.fleet.replicas()}

    def active(self) -> dict[str, str]:
        return {name: one.url for name, one in self.replicas().items() if one.state == "active"}

    def decisions(self) -> list[Decision]:
        """All of them, the oldest first."""
        found = self.store.fleet.decisions(POOL, limit=20_000)
        return [msgspec.json.decode(row.document, type=Decision) for row in reversed(found)]

    @property
    def gateway(self) -> tuple[str, int]:
        """Host and port, once it listens: a replica may be there before it."""
        log = self.home / "fleet" / "penstock" / "gateway" / "process" / "log"

        def look() -> re.Match[str] | None:
            text = log.read_text() if log.exists() else ""
            return re.search(r"penstock gateway at http://([^:]+):(\d+)", text)

        found = eventually(look)
        assert found is not None
        return found[1], int(found[2])

    def chat(self) -> int:
        """The status of a short answer."""
        with contextlib.closing(http.client.HTTPConnection(*self.gateway, timeout=PATIENCE_S)) as connection:
            body = {"model": POOL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def models(self) -> list[str]:
        """Returns what the gateway lists, once it listens."""
        try:
            with contextlib.closing(http.client.HTTPConnection(*self.gateway, timeout=PATIENCE_S)) as connection:
                connection.request("GET", "/v1/models")
                return [one["id"] for one in json.loads(connection.getresponse().read())["data"]]
        except (OSError, AssertionError):
            return []

    def process_of(self, replica: str) -> int:
        address = self.home / "fleet" / "penstock" / "replicas" / replica / "address.json"
        return int(json.loads(address.read_bytes())["pid"])

    def signal(self, replica: str, number: signal.Signals) -> None:
        """Sends a signal to the replica's server and its engine at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_of(replica), number)

    def signal_server(self, replica: str, number: signal.Signals) -> None:
        """Sends a signal to the replica's server alone, as a service manager does."""
        os.kill(self.process_of(replica), number)

    def processes(self) -> list[str]:
        """Command lines of all that runs for this fleet, but for its controllers."""
        lines = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        return [line for line in lines if str(self.home) in line]


@contextlib.contextmanager
def real_fleet(
    directory: Path, model: Path | str, *, settings: Mapping[str, Any] | None = None, **pool: Any
) -> Iterator[RealFleet]:
    """`model`: a directory holds a shape only, whose weights are made up."""
    if isinstance(model, Path):
        pool = {"engine": {"load": "dummy", "dtype": "float32"}, **pool}
    fleet = RealFleet(directory, str(model), pool, dict(settings or {}))
    try:
        yield fleet
    except AssertionError:
        for log in [directory / "controllers.log", *directory.glob("home/fleet/penstock/*/*/log")]:
            print(f"=== {log}\n{log.read_text()[-3000:]}")
        raise
    finally:
        for process in fleet.controllers:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        fleet.run("fleet", "down", "--config", str(fleet.config))
        fleet.store.close()


def wait_for_service(fleet: RealFleet) -> None:
    """Waits until the gateway has answered a request, for which a pool at zero starts its first replica."""
    eventually(fleet.models, within_s=PATIENCE_S)
    eventually(fleet.chat, lambda status: status == 200, within_s=PATIENCE_S)
