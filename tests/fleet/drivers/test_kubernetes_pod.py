"""Manifests of replicas: valid for every version, without secrets, and open to what an operator adds."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import kubernetes_validate
import pytest

from penstock.cli import engine_command
from penstock.cli.flags import settings_from
from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings, ServerSettings, Settings, TelemetrySettings
from penstock.core.slo import Slo
from penstock.fleet.drivers.driver import ReplicaSpec
from penstock.fleet.drivers.kubernetes_pod import merge, pod_name, render_group, render_pod, selector
from penstock.fleet.drivers.kubernetes_settings import KubernetesSettings
from penstock.fleet.policy.observation import CapacityType
from penstock.http.kubernetes_api import Object

SETTINGS = Settings(
    "hf:org/name$(POD_IP)",
    EngineSettings(max_model_len=512, prefix_cache=False),
    ServerSettings(name="m", port=1, gateway_secret="s3cret", metrics_token="t0ken", lora={"poet": "/a"}),
    Slo(tpot_s=None),
    TelemetrySettings(sample=0.5),
)
SPEC = ReplicaSpec("m-abc", "m@v2", SETTINGS, "eu-1a", CapacityType.SPOT, gpus=2)
FULL = KubernetesSettings(
    image="penstock:1",
    service_account="replica",
    resources={"requests": {"cpu": "4"}},
    tolerations=[{"key": "gpu", "operator": "Exists"}],
    node_selector={"gpu": "h100"},
    spot_node_selector={"karpenter.sh/capacity-type": "spot"},
    spot_tolerations=[{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    cache_volume={"hostPath": {"path": "/var/cache/penstock", "type": "DirectoryOrCreate"}},
    template={
        "metadata": {"labels": {"team": "a"}},
        "spec": {"priorityClassName": "models", "containers": [{"name": "penstock", "env": [{"name": "X"}]}]},
    },
)


def container(pod: Object) -> Object:
    found: Object = pod["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("settings", [KubernetesSettings(image="penstock:1"), FULL])
@pytest.mark.parametrize("version", ["1.37", "1.36", "1.35", "1.25"])
def test_a_pod_is_valid_on_new_and_old_clusters(settings: KubernetesSettings, version: str) -> None:
    kubernetes_validate.validate(render_pod("fleet", SPEC, settings, 600.0), version, strict=True)


def test_settings_come_through_the_pod_to_the_engine() -> None:
    arguments = container(render_pod("fleet", SPEC, FULL, 600.0))["args"]
    assert arguments[-4:] == ["--host", "$(POD_IP)", "--port", "8000"]
    expanded = [
        one.replace("$$(", "$(") if "model" in one else "10.0.0.1" if "POD" in one else one for one in arguments
    ]
    parser = argparse.ArgumentParser()
    engine_command.add_flags(parser)
    found = settings_from(parser.parse_args(expanded[1:]))
    server = replace(SETTINGS.server, host="10.0.0.1", port=8000, gateway_secret=None, metrics_token=None)
    assert found == replace(SETTINGS, server=server)


def test_no_secret_stands_in_a_pod() -> None:
    pod = render_pod("fleet", SPEC, FULL, 600.0)
    assert "s3cret" not in json.dumps(pod)
    assert "t0ken" not in json.dumps(pod)
    env = {one["name"]: one for one in container(pod)["env"]}
    assert env["PENSTOCK_GATEWAY_SECRET"]["valueFrom"]["secretKeyRef"]["name"] == "penstock-replicas"


def test_spot_zone_gpus_and_grace_are_in_the_pod() -> None:
    pod = render_pod("fleet", SPEC, FULL, 601.0)
    spec = pod["spec"]
    assert spec["nodeSelector"] == {
        "gpu": "h100",
        "karpenter.sh/capacity-type": "spot",
        "topology.kubernetes.io/zone": "eu-1a",
    }
    assert [one["key"] for one in spec["tolerations"]] == ["gpu", "spot"]
    assert container(pod)["resources"] == {
        "requests": {"cpu": "4", "nvidia.com/gpu": "2"},
        "limits": {"nvidia.com/gpu": "2"},
    }
    assert spec["terminationGracePeriodSeconds"] == 5 + 30 + 10
    assert container(pod)["startupProbe"]["failureThreshold"] == 121
    on_demand = render_pod("fleet", replace(SPEC, capacity_type=CapacityType.ON_DEMAND), FULL, 600.0)
    assert "karpenter.sh/capacity-type" not in on_demand["spec"]["nodeSelector"]


def test_an_operators_template_is_merged_over_ours() -> None:
    pod = render_pod("fleet", SPEC, FULL, 600.0)
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["spec"]["priorityClassName"] == "models"
    assert container(pod)["image"] == "penstock:1"
    assert [one["name"] for one in container(pod)["env"]][-1] == "X"
    with pytest.raises(ConfigError, match="metadata and spec"):
        render_pod("fleet", SPEC, replace(FULL, template={"containers": []}), 600.0)
    assert merge({"a": 1, "b": [1]}, {"a": None, "b": [2]}) == {"b": [2]}


def test_a_pool_has_settings_of_its_own_but_no_cluster_of_its_own() -> None:
    assert FULL.of_pool("m", {"image": "other", "port": 9000}) == replace(FULL, image="other", port=9000)
    with pytest.raises(ConfigError, match="one cluster"):
        FULL.of_pool("m", {"namespace": "elsewhere"})


@pytest.mark.parametrize("replica", ["m-0a1b", "Qwen/Qwen2.5-7B-0a1b", "x" * 80, "@@", "a.b"])
def test_a_pods_name_is_one_that_kubernetes_takes(replica: str) -> None:
    name = pod_name(replica)
    assert name == pod_name(replica)
    assert len(name) <= 52
    assert name.strip("-") == name
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name != pod_name(replica + "0")


TWO_NODES = replace(SPEC, settings=replace(SETTINGS, engine=replace(SETTINGS.engine, tp=2, pp=2)), gpus=4)


def test_a_replica_over_two_nodes_is_one_group() -> None:
    group = render_group("fleet", TWO_NODES, replace(FULL, nodes=2), 600.0)
    template = group["spec"]["leaderWorkerTemplate"]
    assert (template["size"], group["spec"]["replicas"]) == (2, 1)
    assert template["restartPolicy"] == "None"  # a node that ends joins again, and the others stay
    for part in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **template[part]}
        kubernetes_validate.validate(pod, "1.37", strict=True)
        assert container(pod)["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_all_pods_of_a_group_run_the_same_command_and_only_the_first_is_asked_over_http() -> None:
    template = render_group("fleet", TWO_NODES, replace(FULL, nodes=2), 600.0)["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    for key in ("command", "args", "env", "image"):  # which node it is, LeaderWorkerSet's variables say
        assert container(leader)[key] == container(worker)[key]
    assert any(one["name"] == "PENSTOCK_GATEWAY_SECRET" for one in container(worker)["env"])
    assert container(leader)["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle"} & container(worker).keys()

    def is_found(pod: Object) -> bool:
        labels = pod["metadata"]["labels"]
        return all(
            labels.get(key) == value for key, value in (term.split("=") for term in selector("fleet").split(","))
        )

    assert is_found(leader)
    assert not is_found(worker)  # a gateway would send it requests


def test_ranks_that_are_left_open_are_the_replicas_affair() -> None:
    assert render_group("fleet", SPEC, replace(FULL, nodes=2), 600.0)["spec"]["leaderWorkerTemplate"]["size"] == 2


def test_what_cannot_be_spread_over_nodes_is_refused() -> None:
    single = replace(SPEC, settings=replace(SETTINGS, engine=replace(SETTINGS.engine, tp=1, pp=1)))
    with pytest.raises(ConfigError, match="tp 1 and pp 1 cannot be spread over 2 nodes") as refused:
        render_group("fleet", single, replace(FULL, nodes=2), 600.0)
    assert refused.value.param == "kubernetes.nodes"
    with pytest.raises(ConfigError, match="3 GPUs cannot be shared out among 2 nodes"):
        render_group("fleet", replace(TWO_NODES, gpus=3), replace(FULL, nodes=2), 600.0)
