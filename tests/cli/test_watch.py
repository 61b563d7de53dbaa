"""Drills on real processes: each fault raises exactly its alert, delivered by webhook; and by a real Prometheus and
Alertmanager, where they are installed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.observe.gpu.fake import FakeGpus
from penstock.tenancy.fleet import PoolStatus
from penstock.watch.grafana import panel_queries
from penstock.watch.prometheus_rules import rules_document
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.fleet.managed import managed
from tests.gateway.provider import providing
from tests.server.replica import NAME, serving
from tests.waiting import eventually
from tests.watch.sink import Sink, sinking

pytestmark = pytest.mark.slow

has_prometheus = all(shutil.which(name) for name in ("prometheus", "prometheus-alertmanager"))
needs_prometheus = pytest.mark.skipif(not has_prometheus, reason="Prometheus and Alertmanager are not installed")


RUNBOOKS = "https://runbooks.example/penstock"
PATIENT = {"ttft_s": 600.0, "latency_s": 6000.0, "tpot_s": 60.0}  # objectives that a busy machine keeps too


def watching(sink: Sink, *, hold_s: float = 600.0, **probes: Any) -> dict[str, Any]:
    alerts = {"webhook": f"{sink.url}/hook", "group_wait_s": 0, "hold_s": hold_s, "runbooks": RUNBOOKS}
    return {"watch": {"sample_s": 2, "alerts": alerts, "probes": probes or {"every_s": 0}}, "slo": PATIENT}


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
            stream(gateway, number, tokens=6)
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


def unseen(gateway: RealGateway) -> list[str]:
    """Models of which the watch has not looked at the replicas yet."""
    models = gateway.ask("GET", "/admin/v1/slo")[1]["models"]
    return [
        model["model"]
        for model in models
        if not any(one["objective"] == "availability" and one["events"] for one in model["objectives"])
    ]


def test_a_slow_replica_is_told_of_and_gets_less(tmp_path: Path) -> None:
    """Each replica is compared with the mean of the others. A slow one that takes four times as long keeps that mean so
    low that a busy machine makes neither of the others look slow."""
    with sinking() as sink, serving(step_s=0.02) as a, serving(step_s=0.02) as b, serving(step_s=0.08) as slow:
        settings = watching(sink)
        with real_gateway(tmp_path, a, b, slow, **settings) as gateway, loaded(gateway):
            [alert] = eventually(sink.alerts)
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
        probes = {"every_s": 0.3, "timeout_s": 600.0}
        with real_gateway(tmp_path, *well, garbage, **watching(sink, hold_s=1.0, **probes)) as gateway:
            [alert] = eventually(sink.alerts)
            assert (alert["labels"]["alertname"], alert["labels"]["severity"]) == ("WrongAnswers", "page")
            assert alert["labels"]["replica"].endswith(f":{garbage.port}")
            states = {one["replica"].rpartition(":")[2]: one["state"] for one in found(gateway, "probes")}
            assert states == {str(well[0].port): "ok", str(well[1].port): "ok", str(garbage.port): "wrong"}
            [shown] = found(gateway, "alerts")
            assert (shown["alert"], shown["runbook"]) == ("WrongAnswers", f"{RUNBOOKS}/wrong-answers.md")
            garbage.call("POST", "/v1/penstock/drain")
            eventually(lambda: [one["status"] for one in sink.alerts()], lambda told: told == ["firing", "resolved"])
            assert [one["state"] for one in found(gateway, "alerts")] == ["resolved"]


def test_a_killed_engine_and_an_xid_error_are_pages(tmp_path: Path) -> None:
    """One model each: an engine that is killed, an XID error of a program's making, and a GPU that fell off the bus."""
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(sinking())
        pairs = {name: [stack.enter_context(serving()) for _ in range(2)] for name in ("crash", "program", "bus")}
        models = {
            name: {"replicas": [f"http://{one.host}:{one.port}" for one in pair], "served_as": "small"}
            for name, pair in pairs.items()
        }
        xids = {"program": 31, "bus": 79}
        gpus = {name: FakeGpus() for name in xids}
        for name, devices in gpus.items():
            pairs[name][0].app.devices.take(devices.read())
        gateway = stack.enter_context(real_gateway(tmp_path, models=models, **watching(sink)))
        eventually(lambda: unseen(gateway), lambda models: not models)

        def told() -> set[tuple[str, ...]]:
            names = ("model", "alertname", "replica", "device", "xid")
            return {tuple(alert["labels"].get(name, "") for name in names) for alert in sink.alerts()}

        expected = set()
        for name, xid in xids.items():
            gpus[name].raise_xid("GPU-1", xid)
            pairs[name][0].app.devices.take(gpus[name].read())
            expected.add((name, "GpuXid", models[name]["replicas"][0], "GPU-1", str(xid)))
        eventually(told, lambda found: found >= expected)
        for name, devices in gpus.items():  # the driver says it once
            pairs[name][0].app.devices.take(devices.read())
        pairs["crash"][0].kill_engine()
        expected.add(("crash", "ProcessCrash", models["crash"]["replicas"][0], "", ""))
        eventually(told, lambda found: found >= expected)
        assert told() == expected
        assert len(sink.alerts()) == len(expected)
        assert {(one["model"], one["alert"]) for one in found(gateway, "alerts")} == {one[:2] for one in expected}
        assert {alert["labels"]["severity"] for alert in sink.alerts()} == {"page"}


# -- Prometheus


class Prometheus:
    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=60) as answer:
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
        },
    }
    with contextlib.ExitStack() as stack:
        for name in ("rules.yml", "alertmanager.yml"):
            (directory / name).write_text(yaml.safe_dump(files[name]))
        manager = stack.enter_context(
            listening(
                "prometheus-alertmanager",
                f"--config.file={directory / 'alertmanager.yml'}",
                f"--storage.path={directory / 'am'}",
                "--cluster.listen-address=",
                log=directory / "alertmanager.log",
            )
        )
        alerting = {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(files["prometheus.yml"] | {"alerting": alerting}))
        address = stack.enter_context(
            listening(
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                log=directory / "prometheus.log",
            )
        )
        server = Prometheus(address)
        eventually(server.is_ready)
        yield server


@contextlib.contextmanager
def listening(*command: str, log: Path) -> Iterator[str]:
    """Runs it on a port that it picks itself; its log says which."""
    with (
        log.open("w") as lines,
        subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=lines, stderr=lines) as process,
    ):
        try:
            said = r'"Listening on" address=(127\.0\.0\.1:\d+)'
            yield eventually(lambda: re.findall(said, log.read_text()))[0]
        finally:
            process.terminate()


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
        settings = watching(sink, every_s=0.5, timeout_s=600.0)
        gateway = stack.enter_context(real_gateway(tmp_path, models=models, **settings))
        targets = [url.removeprefix("http://") for url in (gateway.url, *models["small"]["replicas"])]
        server = stack.enter_context(prometheus(tmp_path, sink, *targets))
        stack.enter_context(managed(gateway.store, PoolStatus("small", 0.0, states={"active": 2}, **_SCALING)))
        with loaded(gateway, clients=2):
            eventually(lambda: server.has('penstock_slo_events_total{model="flaky", met="false"}'))
            _burn(gateway, provider)
            eventually(server.firing, lambda names: names == {"BudgetBurningFast"})
            eventually(lambda: {path for path, _ in sink.taken}, lambda paths: paths == {"/hook", "/alertmanager"})
            eventually(lambda: _empty(server), lambda titles: not titles)
        assert {alert["labels"]["alertname"] for alert in sink.alerts()} == {"BudgetBurningFast"}
        assert {alert["labels"]["objective"] for alert in sink.alerts()} == {"errors"}
        assert {one["alert"] for one in found(gateway, "alerts")} == {"BudgetBurningFast"}


_SCALING: dict[str, Any] = {"counts": {"start": 2}, "durations": {"start_s": 1.0}}


def test_fleet_whose_starts_fail_is_an_alert_and_is_in_the_metrics(tmp_path: Path) -> None:
    status = PoolStatus(
        NAME, 0.0, wanted=2, states={"active": 1}, start_failures=3, failure="no disk", cost_per_hour=2.5
    )
    with (
        serving() as replica,
        real_gateway(tmp_path, replica) as gateway,
        managed(gateway.store, status),
    ):
        (alert,) = eventually(lambda: found(gateway, "alerts"))
        assert (alert["alert"], alert["model"]) == ("ReplicaStartsFailing", NAME)
        assert alert["summary"] == f"{NAME}: 3 starts in a row failed: no disk"
        text = gateway.ask("GET", "/metrics")[1].decode()
    assert f'penstock_fleet_replicas{{pool="{NAME}",state="active"}} 1' in text
    assert f'penstock_fleet_cost_per_hour{{pool="{NAME}"}} 2.5' in text
    assert f'penstock_fleet_failed_starts{{pool="{NAME}"}} 3' in text


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
