"""Manifests of kinds that are not Kubernetes' own, those of the chart and the example in docs/endpoint-picker.md,
checked by the schemas of these kinds."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tools.helm import NEWEST, ROOT, render

from penstock.cli.main import parser
from penstock.core.config import build
from penstock.gateway.settings.gateway import GatewaySettings
from tests.deploy.chart import Manifest, manifests, needs_helm, of_kind, pods
from tests.deploy.custom_resources import complaints, needs_schemas, validate_pool

pytestmark = pytest.mark.slow

KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject")


def example() -> list[list[Manifest]]:
    """YAML in docs/endpoint-picker.md, by block."""
    text = (ROOT / "docs/endpoint-picker.md").read_text()
    return [list(yaml.safe_load_all(block)) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


@needs_helm
@needs_schemas
def test_their_schemas_accept_them() -> None:
    names = ("gpu", "keda", "public", "envoy", "tls")
    found = [one for name in names for one in manifests(name) if one["kind"] in KINDS]
    assert {one["kind"] for one in found} == set(KINDS)
    broken = copy.deepcopy(next(one for one in found if one["kind"] == "ScaledObject"))
    broken["spec"]["triggers"][0].pop("type")
    *verdicts, of_the_broken = complaints([*found, broken])
    assert verdicts == [""] * len(found)
    assert "type" in of_the_broken


@needs_helm
def test_inference_pool_names_the_endpoint_picker_and_finds_every_replica() -> None:
    (pool,) = of_kind("envoy", "InferencePool").values()
    validate_pool(pool)
    check_picker(pool, of_kind("envoy", "Service"))
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    found = {key: pod for key, pod in pods("envoy").items() if wanted <= pod["metadata"]["labels"].items()}
    assert found.keys() == {"penstock-embed"}  # the controller's pods: test_chart_config.py
    (port,) = found["penstock-embed"]["spec"]["containers"][0]["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]


@needs_helm
def test_values_of_the_docs_make_an_inference_pool(tmp_path: Path) -> None:
    _, (values,), _ = example()
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    rendered = yaml.load_all(render("--values", path), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert [one["metadata"]["name"] for one in rendered if one and one["kind"] == "InferencePool"] == ["penstock"]


@pytest.mark.parametrize(
    "change",
    [
        {"endpointPickerRef": {"name": "epp", "portNumber": 9002}},
        {"extensionRef": {"name": "epp"}},
        {"targetPorts": [{"number": 0}]},
        {"selector": {"app": "x"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_inference_pool_of_another_version_is_refused(change: Manifest) -> None:
    pool = next(one for one in example()[-1] if one["kind"] == "InferencePool")
    with pytest.raises(jsonschema.ValidationError):
        validate_pool(pool | {"spec": pool["spec"] | change})


@needs_schemas
def test_example_of_the_docs_is_valid_and_its_parts_name_each_other() -> None:
    (settings,), _, objects = example()
    picking = build(GatewaySettings, settings).endpoint_picker
    by_kind = {one["kind"]: one for one in objects}
    assert by_kind.keys() == {"InferencePool", "HTTPRoute", "Service", "Deployment"}
    validate_pool(by_kind["InferencePool"])
    assert complaints([by_kind["HTTPRoute"]]) == [""]
    for kind in ("Service", "Deployment"):
        kubernetes_validate.validate(by_kind[kind], NEWEST, strict=True)
    (rule,) = by_kind["HTTPRoute"]["spec"]["rules"]
    assert [one["name"] for one in rule["backendRefs"]] == [by_kind["InferencePool"]["metadata"]["name"]]
    service, pod = by_kind["Service"], by_kind["Deployment"]["spec"]["template"]
    check_picker(by_kind["InferencePool"], {service["metadata"]["name"]: service})
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert parser().parse_args(container["args"]).config.parent.as_posix() in str(container["volumeMounts"])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"ext-proc": picking.port, "health": picking.health_port, "metrics": picking.metrics_port}
    assert pod["spec"]["terminationGracePeriodSeconds"] > picking.drain_s


def check_picker(pool: Manifest, services: dict[str, Manifest]) -> None:
    """The Service that a pool names has the port that it names."""
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["port"]["number"] in [one["port"] for one in services[picker["name"]]["spec"]["ports"]]
