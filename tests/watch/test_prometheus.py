"""The generated rules, by Prometheus' own judgement: promtool runs them on its own virtual clock."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.observe.catalog import CATALOG
from penstock.observe.fleet_catalog import FLEET_CATALOG
from penstock.observe.gateway_catalog import GATEWAY_CATALOG
from penstock.observe.rollout_catalog import ROLLOUT_CATALOG
from penstock.observe.watch_catalog import WATCH_CATALOG
from penstock.watch.grafana import dashboard, panel_queries
from penstock.watch.kinds import KINDS
from penstock.watch.prometheus_rules import alert_names, rules_document

ROOT = Path(__file__).parents[2]
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")

GOAL = [
    {"series": f'penstock_slo_goal_ratio{{model="m",objective="{name}"}}', "values": f"{goal}x400"}
    for name, goal in (("errors", 0.999), ("availability", 0.999), ("ttft", 0.95))
]


def series(text: str, values: str) -> dict[str, str]:
    return {"series": text, "values": values}


USED = series('penstock_slo_used_ratio{model="m",objective="ttft"}', "0.85x400")


def events(objective: str, good: int, bad: int) -> list[dict[str, str]]:
    """So many a minute, for hours."""
    name = f'penstock_slo_events_total{{model="m",objective="{objective}",met='
    return [series(f'{name}"true"}}', f"0+{good}x400"), series(f'{name}"false"}}', f"0+{bad}x400")]


def fired(tmp_path: Path, inputs: list[dict[str, str]], at: str = "90m") -> set[tuple[str, str]]:
    """Names and severities of what fires then: promtool complains of everything that it was not told to expect."""
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules_document()))
    nothing = [{"eval_time": at, "alertname": name, "exp_alerts": []} for name in alert_names()]
    test = {"interval": "1m", "input_series": [*GOAL, *inputs], "alert_rule_test": nothing}
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    complaints = (done.stdout + done.stderr).split("alertname: ")[1:]
    assert bool(complaints) == bool(done.returncode), done.stdout + done.stderr
    return {(text.split(",")[0], "page" if 'severity="page"' in text else "ticket") for text in complaints}


@promtool
@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (events("errors", 6000, 0), set()),
        (events("errors", 6000, 72), {("BudgetBurning", "ticket")}),
        (events("errors", 6000, 120), {("BudgetBurningFast", "page")}),
        (events("availability", 54, 6), {("BudgetBurningFast", "page")}),
        ([series('penstock_gateway_queue_length{model="m",class="normal"}', "5x400")], {("QueueSustained", "ticket")}),
        ([USED, *events("ttft", 60, 0)], {("ObjectiveAtRisk", "ticket")}),
        ([USED, *events("ttft", 1, 0)], set()),
        (events("ttft", 0, 1), set()),
        (events("ttft", 0, 2), {("BudgetBurningFast", "page")}),
        ([series('penstock_alerts_firing{alert="ModelDown",model="m"}', "1x400")], {("ModelDown", "page")}),
        ([series('penstock_alerts_firing{alert="GpuXid",model="m"}', "1x400")], {("GpuXid", "page")}),
    ],
    ids=[
        "well",
        "twelve times",
        "twenty times",
        "down",
        "queue",
        "at risk",
        "few requests at risk",
        "few slow requests",
        "slow requests",
        "no replica",
        "xid",
    ],
)
def test_prometheus_raises_the_same_alert_and_only_that(
    tmp_path: Path, inputs: list[dict[str, str]], expected: set[tuple[str, str]]
) -> None:
    assert fired(tmp_path, inputs) == expected


@promtool
@pytest.mark.slow
def test_first_token_far_too_late_is_seen_in_the_histogram(tmp_path: Path) -> None:
    bucket = 'penstock_gateway_ttft_seconds_bucket{{model="m",le="{0}"}}'
    inputs = [
        series(bucket.format("0.5"), "0+90x400"),
        series(bucket.format("3"), "0+100x400"),
        series(bucket.format("+Inf"), "0+100x400"),
        series('penstock_gateway_ttft_seconds_count{model="m"}', "0+100x400"),
        series('penstock_slo_target_seconds{model="m",objective="ttft"}', "0.5x400"),
    ]
    assert fired(tmp_path, inputs) == {("TtftFarOverTarget", "page")}


@promtool
def test_rules_are_valid() -> None:
    subprocess.run(["promtool", "check", "rules", ROOT / "deploy/prometheus/penstock.rules.yml"], check=True)


def test_what_is_deployed_is_what_the_commands_write() -> None:
    assert yaml.safe_load((ROOT / "deploy/prometheus/penstock.rules.yml").read_text()) == rules_document()
    assert json.loads((ROOT / "deploy/grafana/penstock.json").read_text()) == dashboard()


def test_every_alert_has_a_rule() -> None:
    groups: Any = rules_document()["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule} == set(alert_names())
    assert {kind.name for kind in KINDS} <= set(alert_names())


def test_panels_and_rules_ask_for_metrics_that_exist() -> None:
    import re

    known = {metric.name for metric in (*CATALOG, *GATEWAY_CATALOG, *WATCH_CATALOG, *FLEET_CATALOG, *ROLLOUT_CATALOG)}
    groups: Any = rules_document()["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    texts = [rule["expr"] for group in groups for rule in group["rules"]]
    texts += [query.expr for queries in panel_queries().values() for query in queries]
    for text in texts:
        for name in re.findall(r"penstock[:_][a-z0-9_:]+", text):
            assert re.sub(r"_(bucket|count|sum)$", "", name) in known or name in known | recorded, name
