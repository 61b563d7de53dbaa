"""Drills on real processes: each fault raises exactly its alert, delivered by webhook; and by a real Prometheus and
Alertmanager, where they are installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.observe.gpu.fake import FakeGpus
from penstock.watch.grafana import panel_queries
from penstock.watch.prometheus_rules import rules_document
from tests.cli.real_gateway import RealGateway, real_gateway, until
from tests.gateway.provider import providing
from tests.server.replica import serving
from tests.watch.sink import Sink, sinking

pytestmark = pytest.mark.slow

has_prometheus = all(shutil.which(name) for name in ("prometheus", "prometheus-alertmanager"))
needs_prometheus = pytest.mark.skipif(not has_prometheus, reason="Prometheus and Alertmanager are not installed")


def watching(sink: Sink, **probes: Any) -> dict[str, Any]:
    alerts = {"webhook": f"{sink.url}/hook", "group_wait_s": 0, "hold_s": 1}
    return {"sample_s": 2, "alerts": alerts, "probes": probes or {"every_s": 0}}


def stream(gateway: RealGateway, number: int, tokens: int = 40) -> None:
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": f"{number}"}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert gateway.ask("POST", "/v1/chat/completions", body)[0] == 200


@contextlib.contextmanager
def loaded(gateway: RealGateway, clients: int = 9) -> Iterator[None]:
    """Streams, one after another at each client, as long as it lasts."""
    ended = threading.Event()

    def ask(client: int) -> None:
        number = 1000 * client
        while not ended.is_set():
            stream(gateway, number, tokens=12)
            number += 1

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def found(gateway: RealGateway, what: str) -> list[dict[str, Any]]:
    return list(gateway.ask("GET", f"/admin/v1/{what}")[1][what])


def has_looked(gateway: RealGateway) -> bool:
    objectives = gateway.ask("GET", "/admin/v1/slo")[1]["models"][0]["objectives"]
    return any(one["objective"] == "availability" and one["events"] for one in objectives)


def test_a_replica_at_half_speed_is_told_of_and_gets_less(tmp_path: Path) -> None:
    with sinking() as sink, serving(step_s=0.02) as a, serving(step_s=0.02) as b, serving(step_s=0.04) as slow:
        settings = {"watch": watching(sink), "slo": {"ttft_s": 5.0, "latency_s": 60.0, "tpot_s": 1.0}}
        with real_gateway(tmp_path, a, b, slow, **settings) as gateway, loaded(gateway):
            until(lambda: bool(sink.taken), 60.0)
            [alert] = sink.alerts()
            assert (alert["labels"]["alertname"], alert["labels"]["severity"]) == ("ReplicaSlow", "ticket")
            assert alert["labels"]["replica"].endswith(f":{slow.port}")
            penalties = {one["replica"].rpartition(":")[2]: one["penalty"] for one in found(gateway, "speeds")}
            assert penalties[str(slow.port)] < 0.8
            assert (penalties[str(a.port)], penalties[str(b.port)]) == (1.0, 1.0)
            [share] = [one["share"] for one in found(gateway, "replicas") if one["id"].endswith(f":{slow.port}")]
            assert share <= penalties[str(slow.port)] + 0.1
            assert {one["alert"] for one in found(gateway, "alerts")} == {"ReplicaSlow"}


def test_a_replica_that_answers_garbage_is_told_of_until_it_is_out(tmp_path: Path) -> None:
    with contextlib.ExitStack() as replicas, sinking() as sink:
        well = [replicas.enter_context(serving()) for _ in range(2)]
        garbage = replicas.enter_context(serving(vocab_size=100))
        with real_gateway(tmp_path, *well, garbage, watch=watching(sink, every_s=0.3)) as gateway:
            until(lambda: bool(sink.taken), 20.0)
            [alert] = sink.alerts()
            assert (alert["labels"]["alertname"], alert["labels"]["severity"]) == ("WrongAnswers", "page")
            assert alert["labels"]["replica"].endswith(f":{garbage.port}")
            states = {one["replica"].rpartition(":")[2]: one["state"] for one in found(gateway, "probes")}
            assert states == {str(well[0].port): "ok", str(well[1].port): "ok", str(garbage.port): "wrong"}
            assert {one["alert"] for one in found(gateway, "alerts")} == {"WrongAnswers"}
            gateway.ask("POST", "/v1/penstock/drain", url=f"http://{garbage.host}:{garbage.port}")
            until(lambda: [one["status"] for one in sink.alerts()] == ["firing", "resolved"], 20.0)
            assert [one["state"] for one in found(gateway, "alerts")] == ["resolved"]


def test_an_engine_that_is_killed_is_a_page(tmp_path: Path) -> None:
    with (
        sinking() as sink,
        serving() as one,
        serving() as other,
        real_gateway(tmp_path, one, other, watch=watching(sink)) as gateway,
    ):
        until(lambda: has_looked(gateway))
        one.kill_engine()
        until(lambda: bool(sink.taken), 20.0)
        assert [alert["labels"]["alertname"] for alert in sink.alerts()] == ["ProcessCrash"]
        assert {one["alert"] for one in found(gateway, "alerts")} == {"ProcessCrash"}


@pytest.mark.parametrize("xid", [31, 79], ids=["a program's fault", "fallen off the bus"])
def test_an_xid_error_is_a_page(tmp_path: Path, xid: int) -> None:
    gpus = FakeGpus()
    with (
        sinking() as sink,
        serving() as one,
        serving() as other,
        real_gateway(tmp_path, one, other, watch=watching(sink)) as gateway,
    ):
        one.app.devices.take(gpus.read())
        until(lambda: has_looked(gateway))
        gpus.raise_xid("GPU-1", xid)
        for _ in range(3):
            one.app.devices.take(gpus.read())
            time.sleep(1.0)
        until(lambda: bool(sink.taken), 20.0)
        [alert] = sink.alerts()
        assert alert["labels"]["alertname"] == "GpuXid"
        assert (alert["labels"]["device"], alert["labels"]["xid"]) == ("GPU-1", str(xid))
        assert alert["labels"]["replica"].endswith(f":{one.port}")
        assert {one["alert"] for one in found(gateway, "alerts")} == {"GpuXid"}


# -- Prometheus


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=5) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def has(self, query: str) -> bool:
        return bool(self.get("/api/v1/query", query=query)["result"])

    def firing(self) -> set[str]:
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


@contextlib.contextmanager
def prometheus(directory: Path, sink: Sink, *targets: str) -> Iterator[Prometheus]:
    """The generated rules, looked at every second, and an Alertmanager that tells the sink."""
    port, manager, cluster = _free_port(), _free_port(), _free_port()
    rules: Any = rules_document()
    for group in rules["groups"]:
        group["interval"] = "1s"
    receiver = {"name": "sink", "webhook_configs": [{"url": f"{sink.url}/alertmanager"}]}
    files = {
        "rules.yml": rules,
        "alertmanager.yml": {
            "route": {"receiver": "sink", "group_wait": "0s", "group_by": ["alertname", "model"]},
            "receivers": [receiver],
        },
        "prometheus.yml": {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(directory / "rules.yml")],
            "scrape_configs": [{"job_name": "penstock", "static_configs": [{"targets": list(targets)}]}],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
        },
    }
    for name, content in files.items():
        (directory / name).write_text(yaml.safe_dump(content))
    commands = [
        [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        [
            "prometheus-alertmanager",
            f"--config.file={directory / 'alertmanager.yml'}",
            f"--storage.path={directory / 'am'}",
            f"--web.listen-address=127.0.0.1:{manager}",
            f"--cluster.listen-address=127.0.0.1:{cluster}",
        ],
    ]
    with (directory / "prometheus.log").open("w") as log, contextlib.ExitStack() as stack:
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(process.terminate)
        server = Prometheus(port)
        until(server.is_ready, 20.0)
        yield server


@needs_prometheus
def test_prometheus_raises_it_too_and_every_panel_has_data(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(sinking())
        replicas = [stack.enter_context(serving(step_s=0.001)) for _ in range(2)]
        provider = stack.enter_context(providing())
        models = {
            "small": {"replicas": [f"http://{one.host}:{one.port}" for one in replicas]},
            "flaky": {"replicas": [provider.url], "dialect": "openai"},
        }
        watch = watching(sink, every_s=0.5)
        gateway = stack.enter_context(real_gateway(tmp_path, models=models, watch=watch))
        targets = [url.removeprefix("http://") for url in (gateway.url, *models["small"]["replicas"])]
        server = stack.enter_context(prometheus(tmp_path, sink, *targets))
        with loaded(gateway, clients=2):
            until(lambda: server.has('penstock_slo_events_total{model="flaky", met="false"}'), 20.0)
            _burn(gateway, provider)
            until(lambda: server.firing() == {"BudgetBurningFast"}, 30.0)
            until(lambda: {path for path, _ in sink.taken} == {"/hook", "/alertmanager"}, 30.0)
            until(lambda: not _empty(server), 30.0)
        assert _empty(server) == []
        assert {alert["labels"]["alertname"] for alert in sink.alerts()} == {"BudgetBurningFast"}
        assert {alert["labels"]["objective"] for alert in sink.alerts()} == {"errors"}
        assert {one["alert"] for one in found(gateway, "alerts")} == {"BudgetBurningFast"}


def _burn(gateway: RealGateway, provider: Any) -> None:
    """One request of ten fails: a hundred times too many."""
    body = {"model": "flaky", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for number in range(300):
        provider.status = 500 if number % 10 == 9 else 200
        status = gateway.ask("POST", "/v1/chat/completions", body)[0]
        assert status == provider.status, status


def _empty(server: Prometheus) -> list[str]:
    """Titles of panels with a query that returns nothing."""
    return [
        title
        for title, queries in panel_queries().items()
        for query in queries
        if not server.has(query.expr.replace("$model", ".*"))
    ]
