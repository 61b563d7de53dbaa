"""`penstock epp` as a user starts it, asked as Envoy asks."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tools.drills.stand import PATIENT

from tests.gateway.endpoint_picker.fake_envoy import FakeEnvoy
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def real_epp(directory: Path, *replicas: Replica) -> Iterator[tuple[FakeEnvoy, int]]:
    """A client of it, and its admin port."""
    config, log = directory / "gateway.yaml", directory / "epp.log"
    urls = [f"http://{replica.host}:{replica.port}" for replica in replicas]
    picking = {"port": 0, "health_port": 0, "metrics_port": 0, "secure": False, "drain_s": 5}
    store = f"sqlite:///{directory / 'store.db'}"
    config.write_text(
        yaml.safe_dump({"store": store, "models": {NAME: {"replicas": urls}}, "endpoint_picker": picking, **PATIENT})
    )
    with log.open("w") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "epp", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | {"PENSTOCK_HOME": str(directory)},
        )
    assert process.stdout is not None
    try:
        lines = process.stdout.readline(), process.stdout.readline()
        ports = [re.search(r"127\.0\.0\.1:(\d+)", line) for line in lines]
        assert ports[0] is not None, log.read_text()
        assert ports[1] is not None, log.read_text()
        with contextlib.closing(FakeEnvoy(int(ports[0][1]))) as envoy:
            yield envoy, int(ports[1][1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _metrics(port: int) -> str:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)) as connection:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def test_the_command_picks_counts_and_ends(tmp_path: Path) -> None:
    with serving() as replica, real_epp(tmp_path, replica) as (envoy, admin_port):
        body = {"model": NAME, "prompt": "the first", "max_tokens": 5, "temperature": 0}

        def answer() -> tuple[int, object]:
            found = envoy.ask(body).forward()
            return found.status, found.json

        status, said = eventually(answer, lambda found: found[0] == 200)  # 503 until the replica was heard of
        assert status == 200
        assert isinstance(said, dict)
        assert said["choices"][0]["text"] == replica.answer("the first", 5)
        served = f'penstock_gateway_tokens_total{{model="{NAME}",kind="output"}} 5'
        eventually(lambda: _metrics(admin_port), lambda found: served in found)
