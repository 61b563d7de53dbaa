"""The Helm chart: Kubernetes' schemas accept its manifests, they hold to what penstock needs, and values that cannot
work are refused with a reason."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils
from tools import helm

from penstock.cli import gateway_process, serve
from penstock.cli.main import parser
from penstock.core.settings import ServerSettings
from penstock.doctor.endpoint import KEY_VARIABLE
from penstock.gateway.endpoint_picker.settings import EndpointPickerSettings
from tests.deploy.chart import VALUES, manifests, needs_helm, of_kind, pods, refusal

VERSIONS = ("1.37", "1.36", "1.35")
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "InferencePool"}  # test_custom_resources.py

pytestmark = [needs_helm, pytest.mark.slow]


def test_helm_finds_nothing_wrong() -> None:
    found = subprocess.run([str(helm.find_helm()), "lint", "--strict", helm.CHART], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.fixture(scope="module")
def schemas_read_once() -> Iterator[None]:
    """The validator reads megabytes of definitions for each manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@pytest.mark.usefixtures("schemas_read_once")
@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_accepts_every_manifest(name: str) -> None:
    for manifest in manifests(name):
        if manifest["kind"] not in CUSTOM:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)


def test_older_clusters_get_the_api_versions_that_they_have() -> None:
    def versions(kube_version: str) -> dict[str, str]:
        found = manifests("default", kube_version)
        return {one["kind"]: one["apiVersion"] for one in found}

    new, old = versions(helm.NEWEST), versions("1.20.2")
    assert (new["PodDisruptionBudget"], new["HorizontalPodAutoscaler"]) == ("policy/v1", "autoscaling/v2")
    assert (old["PodDisruptionBudget"], old["HorizontalPodAutoscaler"]) == ("policy/v1beta1", "autoscaling/v2beta2")
    assert versions("1.22.0")["PodDisruptionBudget"] == "policy/v1"


@pytest.mark.parametrize("name", VALUES)
def test_every_pod_runs_as_nobody_and_writes_to_its_volumes_alone(name: str) -> None:
    for pod in pods(name).values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["spec"]["containers"]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            home = next(one["value"] for one in container["env"] if one["name"] == "PENSTOCK_HOME")
            writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert {home, "/tmp"} <= writable


def test_test_pod_asks_the_gateways_service_with_the_clients_key() -> None:
    def arguments(name: str) -> argparse.Namespace:
        (pod,) = of_kind(name, "Pod").values()
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        (container,) = pod["spec"]["containers"]
        (key,) = (one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == KEY_VARIABLE)
        assert (key["key"], key["optional"]) == ("client-key", True)
        return parser().parse_args(container["args"])

    plain, public, own = arguments("default"), arguments("public"), arguments("tls")
    assert (plain.url, plain.timeout, plain.server_name) == ("http://penstock.serving.svc:80", 300.0, None)
    assert (public.url, public.server_name, public.ca_file) == ("https://llm.serving.svc:443", "llm.example.com", None)
    assert (own.server_name, own.ca_file) == ("penstock.serving.svc", "/run/penstock/tls/ca.crt")


@pytest.mark.parametrize("name", VALUES)
def test_penstock_accepts_the_pods_commands(name: str) -> None:
    for pod in pods(name).values():
        (container,) = pod["spec"]["containers"]
        arguments = parser().parse_args(container["args"])  # a flag that there is not ends the test
        mounted = [one["mountPath"] for one in container["volumeMounts"]]
        assert str(arguments.config.parent) in mounted


@pytest.mark.parametrize("name", VALUES)
def test_a_stop_leaves_time_for_the_drain(name: str) -> None:
    for key, pod in pods(name).items():
        (container,) = pod["spec"]["containers"]
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        if key.endswith("-fleet"):
            continue  # its replicas and gateways go on without it
        (_, before_s) = container["lifecycle"]["preStop"]["exec"]["command"]
        drain_s = {"epp": EndpointPickerSettings().drain_s}.get(container["name"], gateway_process._DRAIN_S)
        if container["name"] == "penstock":
            drain_s = ServerSettings().drain_timeout_s + serve._GOODBYE_S
        assert grace_s > int(before_s) + drain_s, key


def test_the_chart_knows_how_long_streams_drain() -> None:
    text = (helm.CHART / "templates/_helpers.tpl").read_text()
    found = dict(re.findall(r'define "penstock.(gateway|endpointPicker)DrainSeconds" -}}(\d+)', text))
    assert float(found["gateway"]) == gateway_process._DRAIN_S
    assert float(found["endpointPicker"]) == EndpointPickerSettings().drain_s


def test_a_start_has_as_long_as_the_pool_says() -> None:
    probe = pods("hpa")["penstock-chat"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600


def test_gpus_zones_and_spot_nodes_are_asked_for() -> None:
    spec = pods("hpa")["penstock-chat"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["image"] == "penstock:0.1.0-cuda"
    assert spec["nodeSelector"] == {"eks.amazonaws.com/capacityType": "SPOT"}
    assert [one["key"] for one in spec["tolerations"]] == ["nvidia.com/gpu", "spot"]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (zones,) = term["matchExpressions"]
    assert (zones["key"], zones["values"]) == ("topology.kubernetes.io/zone", ["zone-a", "zone-b"])
    assert pods("hpa")["penstock-embed"]["spec"]["containers"][0]["image"] == "penstock:0.1.0-cpu"


def test_rights_are_the_least() -> None:
    def rules(kind: str, name: str) -> set[tuple[str, str]]:
        found = of_kind("default", kind)[name]["rules"]
        return {(resource, verb) for rule in found for resource in rule["resources"] for verb in rule["verbs"]}

    assert rules("Role", "penstock-gateway") == {("pods", verb) for verb in ("get", "list", "watch")}
    assert of_kind("envoy", "Role")["penstock-epp"]["rules"] == of_kind("envoy", "Role")["penstock-gateway"]["rules"]
    assert {resource for resource, _ in rules("Role", "penstock-fleet")} == {"pods", "events", "leases"}
    assert rules("ClusterRole", "serving-penstock-fleet") == {("nodes", verb) for verb in ("get", "list", "watch")}
    every = [rule for kind in ("Role", "ClusterRole") for one in of_kind("gpu", kind).values() for rule in one["rules"]]
    assert not any("*" in (*rule["resources"], *rule["verbs"], *rule["apiGroups"]) for rule in every)
    assert of_kind("single", "ClusterRole") == {}


def test_replicas_are_reached_from_gateways_the_controller_and_prometheus_alone() -> None:
    def peers(name: str) -> list[Any]:
        (rule,) = of_kind(name, "NetworkPolicy")["penstock-replica"]["spec"]["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
        return [
            one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] if "podSelector" in one else one
            for one in rule["from"]
        ]

    assert peers("default") == ["gateway", "fleet"]
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert peers("gpu") == ["gateway", "fleet", monitoring]
    envoy = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "envoy-gateway-system"}}}
    assert peers("envoy") == ["gateway", "fleet", "epp", monitoring, envoy]
    ext_proc, metrics = of_kind("envoy", "NetworkPolicy")["penstock-epp"]["spec"]["ingress"]
    assert (ext_proc["ports"], ext_proc["from"]) == ([{"protocol": "TCP", "port": 9002}], [envoy])
    assert (metrics["ports"], metrics["from"]) == ([{"protocol": "TCP", "port": 9090}], [monitoring])
    gateway = of_kind("default", "NetworkPolicy")["penstock-gateway"]["spec"]["ingress"]
    assert [port["port"] for rule in gateway for port in rule["ports"]] == [8000]  # the admin port is for nobody


def test_a_port_for_grpc_is_reached_as_that_of_http_is() -> None:
    (container,) = pods("public")["llm-gateway"]["spec"]["containers"]
    assert {"name": "grpc", "containerPort": 9000} in container["ports"]
    service = of_kind("public", "Service")["llm"]["spec"]["ports"]
    assert service[1:] == [{"name": "grpc", "port": 9000, "targetPort": "grpc"}]
    rule = of_kind("public", "NetworkPolicy")["llm-gateway"]["spec"]["ingress"][0]
    assert [port["port"] for port in rule["ports"]] == [8000, 9000]
    assert len(of_kind("default", "Service")["penstock"]["spec"]["ports"]) == 1


def test_replicas_over_several_nodes_may_be_made_and_their_nodes_may_meet() -> None:
    (groups,) = (
        one for one in of_kind("nodes", "Role")["penstock-fleet"]["rules"] if "x-k8s.io" in one["apiGroups"][0]
    )
    assert groups == {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets"],
        "verbs": ["get", "list", "watch", "create", "delete"],
    }
    leader, worker = (
        of_kind("nodes", "NetworkPolicy")[f"penstock-{kind}"]["spec"] for kind in ("replica", "replica-worker")
    )
    _, from_workers = leader["ingress"]
    assert [one["podSelector"] for one in from_workers["from"]] == [worker["podSelector"]]
    ((from_both,),) = (worker["ingress"],)
    assert [one["podSelector"] for one in from_both["from"]] == [leader["podSelector"], worker["podSelector"]]


@pytest.mark.parametrize("name", VALUES)
def test_selectors_find_their_pods(name: str) -> None:
    """Services, budgets, policies and monitors of replicas and gateways name labels that those pods have."""
    labels = [pod["metadata"]["labels"] for pod in pods(name).values()]
    for kind in ("Service", "PodDisruptionBudget"):
        for key, one in of_kind(name, kind).items():
            selector = one["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= found.items() for found in labels), key


def test_a_changed_configuration_starts_its_pods_anew_and_a_new_chart_version_does_not() -> None:
    (pod,) = (pod for name, pod in pods("default").items() if name.endswith("-gateway"))
    assert len(pod["metadata"]["annotations"]["checksum/config"]) == 64
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & pod["metadata"]["labels"].keys()


def test_alerts_and_dashboard_are_penstocks() -> None:
    rules = of_kind("gpu", "PrometheusRule")["penstock"]["spec"]
    assert rules == yaml.safe_load((helm.ROOT / "deploy/prometheus/penstock.rules.yml").read_text())
    dashboard = of_kind("gpu", "ConfigMap")["penstock-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["data"]["penstock.json"] == (helm.ROOT / "deploy/grafana/penstock.json").read_text()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["store.kind=sqlite"], "more than one gateway"),
        (["store.kind=sqlite", "gateway.replicas=1"], "more than one gateway"),
        (["store.kind=sqlite", "gateway.replicas=1", "gateway.autoscaling.enabled=false"], "never see a request"),
        (["fleet.enabled=false"], "nobody would start its replicas"),
        (["pools=null"], "a controller without one does not start"),
        (["pools[0].name=a", "pools[0].scaledBy=hpa", "pools[0].settings.min=0"], "cannot scale to zero"),
        (["pools[0].name=a", "pools[1].name=a"], "two pools are called a"),
        (["secret.existingSecret="], "there is no Secret"),
        (["secret.create=true"], "secret.storeUrl"),
        (["secret.create=true", "secret.storeUrl=postgresql://a"], "secret.limiterUrl"),
        (["gateway.terminationGracePeriodSeconds=40"], "they would be cut"),
        (["replicas.cache.kind=persistentVolumeClaim"], "name it in cache.claim"),
        (["endpointPicker.enabled=true"], "networkPolicy.envoyFrom"),
        (["endpointPicker.enabled=true", "replicaTls.secretName=a"], "Envoy sends requests"),
        (
            [
                "endpointPicker.enabled=true",
                "networkPolicy.enabled=false",
                "gateway.config.endpoint_picker.drain_s=400",
            ],
            "400 s of endpoint_picker.drain_s",
        ),
        (["endpointPicker.config.endpoint_picker.prot=1"], "Additional property prot is not allowed"),
        (["gatway.replicas=3"], "Additional property gatway is not allowed"),
        (["gateway.config.grpc_port=8001"], "take another one"),
        (["gateway.config.prot=80"], "Additional property prot is not allowed"),
        (["gateway.config.models.a.replica=80"], "Additional property replica is not allowed"),
        (["fleet.config.pools.a.min=1"], "Additional property pools is not allowed"),
        (["pools[0].name=a", "pools[0].settings.maxx=1"], "Additional property maxx is not allowed"),
        (["pools[0].name=a", "pools[0].settings.engine.quant=int3"], "pools.0.settings.engine.quant"),
        (["pools[0].name=A_b"], "Does not match pattern"),
        (["pools[0].name=a", "pools[0].version=v1", "pools[0].scaledBy=hpa"], "cannot name a version"),
        (["pools[0].settings.min=1"], "name is required"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_cannot_work_are_refused_with_the_reason(values: list[str], reason: str) -> None:
    assert reason in refusal(*values)


def test_secrets_that_the_chart_makes_are_random_and_long() -> None:
    first, second = (of_kind(name, "Secret") for name in ("single", "public"))
    (one,), (other,) = first.values(), second.values()
    assert one["data"]["gateway-secret"] != other["data"]["gateway-secret"]
    assert all(len(one["data"][key]) > 40 for key in ("gateway-secret", "metrics-token", "cache-salt"))
    assert set(other["data"]) - set(one["data"]) == {"store-url", "limiter-url"}
