"""Scaling by Kubernetes: an HPA's external metrics and KEDA's queries are of metrics that penstock exports."""

from __future__ import annotations

import re

import yaml
from tools.helm import ROOT

from penstock.observe import fleet_catalog, gateway_catalog
from penstock.observe.catalog import Metric
from tests.deploy.chart import needs_helm, of_kind

METRICS = {
    one.name: one
    for module in (fleet_catalog, gateway_catalog)
    for one in vars(module).values()
    if isinstance(one, Metric)
}


def check_query(query: str) -> None:
    names = re.findall(r"penstock_\w+", query)
    labels = re.findall(r"by \((\w+)\)|(\w+)=\"", query)
    assert names
    for name in names:
        assert METRICS[name].kind == "gauge"
        assert {one for pair in labels for one in pair if one} <= set(METRICS[name].labels), name


def adapter_rules() -> dict[str, str]:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/adapter.yml").read_text())["external"]
    return {rule["name"]["as"]: rule["metricsQuery"] for rule in rules}


def test_adapter_rules_are_of_metrics_that_there_are() -> None:
    for query in adapter_rules().values():
        check_query(query)


@needs_helm
def test_an_hpa_follows_the_controllers_advice() -> None:
    spec = of_kind("hpa", "HorizontalPodAutoscaler")["penstock-chat"]["spec"]
    (metric,) = spec["metrics"]
    assert metric["external"]["metric"]["name"] in adapter_rules()
    assert metric["external"]["metric"]["selector"] == {"matchLabels": {"pool": "chat"}}
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)
    assert "replicas" not in of_kind("hpa", "Deployment")["penstock-chat"]["spec"]  # the HPA's to say
    assert of_kind("hpa", "Deployment")["penstock-embed"]["spec"]["replicas"] == 3


@needs_helm
def test_keda_counts_requests_where_nobody_advises() -> None:
    spec = of_kind("keda", "ScaledObject")["penstock-chat"]["spec"]
    (trigger,) = spec["triggers"]
    check_query(trigger["metadata"]["query"])
    assert trigger["metadata"]["threshold"] == "8"
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["cooldownPeriod"]) == (0, 10, 900)
