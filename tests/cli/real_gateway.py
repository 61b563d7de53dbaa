"""`penstock gateway` as a user starts it, in front of replicas that are real but for the model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tools.drills.stand import PATIENT

from tests.server.replica import Replica
from tests.waiting import eventually


@dataclass
class RealGateway:
    process: subprocess.Popen[str]
    url: str
    admin_url: str | None  # of a port of its own
    notice: str
    log: Path
    store: str
    trusts: ssl.SSLContext | None = None  # of a gateway with TLS

    def connect(self, url: str | None = None) -> http.client.HTTPConnection:
        scheme, _, place = (url or self.url).partition("://")
        if scheme == "https":
            return http.client.HTTPSConnection(place, timeout=60, context=self.trusts)
        return http.client.HTTPConnection(place, timeout=60)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        url: str | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and body, as JSON where it is JSON."""
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        with contextlib.closing(self.connect(url)) as connection:
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            content = answer.read()
        is_json = answer.headers.get("content-type") == "application/json"
        return answer.status, json.loads(content) if content and is_json else content

    def knows(self, key: str) -> bool:
        """Whether a tenant's key works and no other does: until it hears of the first tenant it is open to any."""
        return [self.ask("GET", "/v1/models", key=one)[0] for one in ("none", key)] == [401, 200]

    def num_ready(self) -> int:
        """The replicas that requests can go to by now. `/ready` says only that there is one."""
        status, metrics = self.ask("GET", "/metrics", url=self.admin_url)
        if status == 200:
            return len(re.findall(rb'^penstock_gateway_replica_state{.*state="ready"} 1', metrics, re.M))
        return self.ask("GET", "/ready")[0] == 200  # a gateway without an admin API: of one replica

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", "penstock.cli.main", *words, "--store", self.store]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _num_replicas(models: dict[str, Any]) -> int:
    """The replicas of models and of their versions."""
    return sum(len(one.get("replicas", ())) + _num_replicas(one.get("versions", {})) for one in models.values())


@contextlib.contextmanager
def real_gateway(
    directory: Path,
    *replicas: Replica,
    price: dict[str, float] | None = None,
    level: str = "debug",
    trusts: ssl.SSLContext | None = None,
    **settings: Any,
) -> Iterator[RealGateway]:
    """Gateways of one directory have one store."""
    store = f"sqlite:///{directory / 'tenants.db'}"
    urls = [f"http://{replica.host}:{replica.port}" for replica in replicas]
    number = len(list(directory.glob("*.yaml")))
    config, log = directory / f"{number}.yaml", directory / f"{number}.log"
    models = {"small": {"replicas": urls, "price": price or {}}}
    config.write_text(yaml.safe_dump({"port": 0, "store": store, "models": models, **PATIENT, **settings}))
    with log.open("w") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "gateway", "--config", str(config), "--log-level", level],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | {"PENSTOCK_HOME": str(directory)},
        )
    assert process.stdout is not None
    try:
        door, notice = process.stdout.readline(), process.stdout.readline()
        found, admin = (re.search(r"https?://\S+?:\d+", line) for line in (door, notice))
        assert found is not None, log.read_text()
        url = found.group().replace("0.0.0.0", "127.0.0.1")
        gateway = RealGateway(process, url, admin and admin.group(), notice.strip(), log, store, trusts)
        num_replicas = _num_replicas(settings.get("models", models))
        eventually(gateway.num_ready, lambda num_ready: num_ready == num_replicas)
        yield gateway
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
