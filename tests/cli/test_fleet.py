"""`penstock fleet` as an operator runs it: real controllers, a real gateway, replicas of a small random model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.hub.home import penstock_home
from penstock.tenancy.fleet import FleetReplica
from penstock.tenancy.store import open_store
from tests.cli.real_server import write_tiny_model
from tests.waiting import eventually

pytestmark = pytest.mark.slow

MODEL = "tiny"
CHAT = "/v1/chat/completions"
PATIENCE_S = 240.0  # for a start on a busy machine


@dataclass
class RealFleet:
    directory: Path
    model: Path
    pool: dict[str, Any]
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.directory / "fleet.yaml"
        self.home = self.directory / "home"
        pool = {"model": str(self.model), "engine": {"load": "dummy", "dtype": "float32"}, **self.pool}
        fleet = {"lease_s": 2.0, "every_s": 0.2, "gateway": {"port": 0}, "pools": {MODEL: pool}}
        self.config.write_text(json.dumps(fleet))
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
        done = subprocess.run(self.command(*words), env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout

    def replicas(self) -> dict[str, FleetReplica]:
        """By id, as the store has them."""
        return {one.id: one for one in self.store.fleet.replicas()}

    def active(self) -> dict[str, str]:
        return {name: one.url for name, one in self.replicas().items() if one.state == "active"}

    @property
    def gateway(self) -> tuple[str, int]:
        log = self.home / "fleet" / "penstock" / "gateway" / "process" / "log"
        found = re.search(r"penstock gateway at http://([^:]+):(\d+)", log.read_text())
        assert found is not None
        return found[1], int(found[2])

    def chat(self) -> int:
        """The status of a short answer."""
        with contextlib.closing(http.client.HTTPConnection(*self.gateway, timeout=PATIENCE_S)) as connection:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def models(self) -> list[str]:
        """What the gateway lists, once it listens."""
        try:
            with contextlib.closing(http.client.HTTPConnection(*self.gateway, timeout=PATIENCE_S)) as connection:
                connection.request("GET", "/v1/models")
                return [one["id"] for one in json.loads(connection.getresponse().read())["data"]]
        except (OSError, AssertionError):
            return []

    def process_of(self, replica: str) -> int:
        address = self.home / "fleet" / "penstock" / "replicas" / replica / "address.json"
        return int(json.loads(address.read_bytes())["pid"])


@contextlib.contextmanager
def real_fleet(directory: Path, model: Path, **pool: Any) -> Iterator[RealFleet]:
    fleet = RealFleet(directory, model, pool)
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


def test_service_goes_on_without_its_controller_and_the_next_one_goes_on_from_there(
    tmp_path: Path, tiny_model: Path
) -> None:
    with real_fleet(tmp_path, tiny_model, min=1, max=2) as fleet:
        first = fleet.start_controller()
        (replica,) = eventually(fleet.active, within_s=PATIENCE_S)
        eventually(fleet.chat, lambda status: status == 200)  # the gateway has heard of it
        first.kill()
        first.wait()
        assert fleet.chat() == 200

        fleet.start_controller()
        fleet.start_controller()  # one of the two waits
        process = psutil.Process(fleet.process_of(replica))
        process.kill()
        process.wait()
        (another,) = eventually(fleet.active, lambda found: found and replica not in found, within_s=PATIENCE_S)
        assert another != replica
        eventually(fleet.chat, lambda status: status == 200)
        assert len(fleet.replicas()) == 1
        assert "start" in fleet.run("fleet", "explain")
        assert another in fleet.run("fleet", "status")
    left = [one for one in psutil.process_iter(["cmdline"]) if str(fleet.home) in " ".join(one.info["cmdline"] or [])]
    assert not left


def test_interrupted_replica_is_replaced_first_and_its_stream_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    with real_fleet(tmp_path, tiny_model, min=1, max=3) as fleet:
        fleet.start_controller()
        (replica,) = eventually(fleet.active, within_s=PATIENCE_S)
        eventually(fleet.chat, lambda status: status == 200)
        options = {"max_tokens": 4000, "min_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}
        with contextlib.closing(http.client.HTTPConnection(*fleet.gateway, timeout=PATIENCE_S)) as connection:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **options}
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            begun = answer.readline()
            fleet.run("replicas", "interrupt", replica, "--seconds", "60")
            whole = begun + answer.read()
        assert whole.rstrip().endswith(b"data: [DONE]")
        assert b'"error"' not in whole
        eventually(fleet.replicas, lambda found: replica not in found, within_s=PATIENCE_S)
        assert len(fleet.active()) == 1


def test_a_pool_at_zero_gets_a_replica_for_its_first_request_which_is_told_how_long_it_waits(tmp_path: Path) -> None:
    """Its model comes while the request waits: until then no start can succeed."""
    model = tmp_path / "model"
    with real_fleet(tmp_path, model, min=0, max=1, hold_s=PATIENCE_S) as fleet:
        fleet.start_controller()
        eventually(fleet.models, lambda names: names == [MODEL], within_s=PATIENCE_S)
        assert not fleet.active()
        with contextlib.closing(http.client.HTTPConnection(*fleet.gateway, timeout=PATIENCE_S)) as connection:

            def ask() -> http.client.HTTPResponse:
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
                connection.request("POST", CHAT, json.dumps({**body, "max_tokens": 5}))
                answer = connection.getresponse()
                return answer if answer.status == 200 else _read(answer)

            # The gateway may not have heard yet that a controller manages the pool.
            answer = eventually(ask, lambda found: found.status == 200)
            assert answer.readline().startswith(b": waiting for a replica")
            model.mkdir()
            write_tiny_model(model)
            assert answer.read().rstrip().endswith(b"data: [DONE]")
        assert len(fleet.active()) == 1


def _read(answer: http.client.HTTPResponse) -> http.client.HTTPResponse:
    """So that its connection can be used again."""
    answer.read()
    return answer
