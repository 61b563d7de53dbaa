"""Configuration files that the chart makes of values, loaded by penstock's own settings."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from penstock.cli.epp import _settings as endpoint_picker_settings
from penstock.cli.flags import add_replica_flags, settings_from
from penstock.cli.fleet_process import fleet_settings, gateway_settings
from penstock.cli.gateway import _settings
from penstock.cli.gateway_process import read_again
from penstock.core.settings import Settings
from penstock.fleet.drivers.driver import ReplicaSpec
from penstock.fleet.drivers.kubernetes_pod import pod_name, render_group, render_pod
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings, replica_settings
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings, pools_of
from tests.deploy.chart import NEWEST, VALUES, config_files, needs_helm, of_kind, pods

pytestmark = needs_helm
SECRET = "PENSTOCK_GATEWAY_SECRET"


def gateway(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    """The gateway's file as `penstock gateway` reads it, with the environment that its pod has."""
    (text,) = (text for key, text in config_files(name).items() if key.endswith("/gateway.yaml"))
    (pod,) = (pod for key, pod in pods(name).items() if key.endswith("-gateway"))
    for variable in pod["spec"]["containers"][0]["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "x"))
    path = folder / "gateway.yaml"
    path.write_text(text)
    return read_again(partial(_settings, path, {}))


def fleet(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FleetSettings:
    """The controller's file as `penstock fleet` reads it."""
    (text,) = (text for key, text in config_files(name).items() if key.endswith("/fleet.yaml"))
    path = folder / "fleet.yaml"
    path.write_text(text)
    monkeypatch.setenv(SECRET, "x")
    with fleet_settings(path) as settings:
        return settings


def replicas(name: str, folder: Path) -> dict[str, Settings]:
    """The file of each Deployment of replicas, as `penstock engine` reads it."""
    found = {}
    for key, text in config_files(name).items():
        if key.endswith("/replica.yaml"):
            path = folder / "replica.yaml"
            path.write_text(text)
            parser = argparse.ArgumentParser()
            add_replica_flags(parser, "")
            found[key.split("/")[0]] = settings_from(parser.parse_args(["--config", str(path)]))
    return found


@pytest.mark.parametrize("name", VALUES)
def test_penstock_accepts_the_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = gateway(name, tmp_path, monkeypatch)
    ports = {one["name"]: one["containerPort"] for one in _gateway_container(name)["ports"]}
    assert (settings.port, settings.admin_port) == (ports["http"], ports["admin"])
    assert settings.store is None  # it is a secret, and so in the environment
    if any(key.endswith("/fleet.yaml") for key in config_files(name)):
        assert fleet(name, tmp_path, monkeypatch).gateway is None  # gateways run elsewhere
    for one in replicas(name, tmp_path).values():
        assert (one.server.host, one.server.port) == ("0.0.0.0", 8000)


@pytest.mark.parametrize("name", ["gpu", "versions"])
def test_gateways_know_the_controllers_pools_as_one_that_it_starts_itself_would(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = gateway(name, tmp_path, monkeypatch)
    given = {"models": {key: {"versions": _weights(one)} for key, one in ours.pools().items() if one.versions}}
    controller = replace(fleet(name, tmp_path, monkeypatch), gateway=given)
    theirs = gateway_settings(controller, "sqlite:///x")
    assert ours.slo == theirs.slo
    assert {key: asdict(one) for key, one in pools_of(ours.pools()).items()} == {
        key: asdict(one) for key, one in pools_of(theirs.pools()).items()
    }


def _weights(model: ModelSettings) -> dict[str, dict[str, float]]:
    return {version: {"weight": values["weight"]} for version, values in model.versions.items()}


def test_both_kinds_of_pods_of_a_replica_over_two_nodes_are_found_by_their_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = fleet("nodes", tmp_path, monkeypatch)
    ((key, pool),) = settings.pool_settings().items()
    spec = ReplicaSpec(f"{key}-1", key, replica_settings(key, pool, settings.slo_of(key, pool)))
    own = settings.kubernetes.of_pool(key, pool.kubernetes)
    parts = render_group(settings.name, spec, own, pool.start_timeout_s)["spec"]["leaderWorkerTemplate"]
    policies = of_kind("nodes", "NetworkPolicy")
    for part, policy in {"leaderTemplate": "penstock-replica", "workerTemplate": "penstock-replica-worker"}.items():
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **parts[part]}, NEWEST, strict=True)
        wanted = policies[policy]["spec"]["podSelector"]["matchLabels"]
        assert wanted.items() <= parts[part]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ["default", "gpu", "public", "versions", "envoy", "tls"])
def test_pods_of_the_controller_are_accepted_and_are_found_by_policies_and_monitors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = fleet(name, tmp_path, monkeypatch)
    (policy,) = (one for key, one in of_kind(name, "NetworkPolicy").items() if key.endswith("-replica"))
    own_pools = {key: pool for key, pool in settings.pool_settings().items() if not pool.advisory}
    for key, pool in own_pools.items():
        wanted = replica_settings(key, pool, settings.slo_of(key, pool))
        for kind in CapacityType:
            spec = ReplicaSpec(f"{key}-1", key, wanted, zone="zone-a", capacity_type=kind, gpus=pool.gpus)
            own = settings.kubernetes.of_pool(key, pool.kubernetes)
            pod = render_pod(settings.name, spec, own, pool.start_timeout_s)
            kubernetes_validate.validate(pod, NEWEST, strict=True)
            assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
            (container,) = pod["spec"]["containers"]
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            volumes = {"cache", "shm", "tmp"} | ({"replica-tls"} if name == "tls" else set())
            assert volumes == {one["name"] for one in container["volumeMounts"]}
            assert volumes == {one["name"] for one in pod["spec"]["volumes"]}
            for inference_pool in of_kind(name, "InferencePool").values():
                wanted_labels = inference_pool["spec"]["selector"]["matchLabels"].items()
                assert wanted_labels <= pod["metadata"]["labels"].items()
            assert pod["spec"]["securityContext"]["runAsUser"] == 10001
            assert pod["spec"]["serviceAccountName"] in of_kind(name, "ServiceAccount")


@pytest.mark.parametrize("name", ["default", "gpu", "public"])
def test_controllers_may_hold_the_lease_that_they_ask_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (role,) = (one for key, one in of_kind(name, "Role").items() if key.endswith("-fleet"))
    named = [rule for rule in role["rules"] if "leases" in rule["resources"] and "resourceNames" in rule]
    assert [rule["resourceNames"] for rule in named] == [[pod_name(fleet(name, tmp_path, monkeypatch).name)]]


def test_spot_pods_and_gpus_are_where_the_values_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fleet("gpu", tmp_path, monkeypatch)
    pool = settings.pool_settings()["qwen3-8b"]
    wanted = replica_settings("qwen3-8b", pool, settings.slo)
    spec = ReplicaSpec("a", "qwen3-8b", wanted, "zone-b", CapacityType.SPOT, pool.gpus)
    own = settings.kubernetes.of_pool("qwen3-8b", pool.kubernetes)
    pod = render_pod(settings.name, spec, own, pool.start_timeout_s)["spec"]
    assert pod["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-H200",
        "karpenter.sh/capacity-type": "spot",
        "topology.kubernetes.io/zone": "zone-b",
    }
    assert [one["key"] for one in pod["tolerations"]] == ["nvidia.com/gpu", "karpenter.sh/capacity-type"]
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": "1"}
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "serving")
    assert pod["containers"][0]["image"] == "penstock:0.1.0-cuda"


def test_gateways_and_an_advising_controller_find_the_pods_of_deployments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = gateway("hpa", tmp_path, monkeypatch).pools()
    (query,) = models["chat"].kubernetes
    labels = pods("hpa")["penstock-chat"]["metadata"]["labels"]
    assert dict(one.split("=") for one in query["selector"].split(",")).items() <= labels.items()
    pool = fleet("hpa", tmp_path, monkeypatch).pool_settings()["chat"]
    assert (pool.advisory, pool.kubernetes) == (True, query)
    assert (models["chat"].secret_env, models["chat"].slo) == (SECRET, {"ttft_s": 0.3})
    one = replicas("hpa", tmp_path)["penstock-chat"]
    assert (one.model, one.server.name, one.slo.ttft_s) == ("hf:Qwen/Qwen3-8B", "chat", 0.3)


def test_values_of_the_operator_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = gateway("public", tmp_path, monkeypatch)
    assert settings.max_arriving_bytes == 2 << 30
    assert settings.cache_salt_env == "PENSTOCK_CACHE_SALT"
    models = settings.pools()
    assert (models["smollm2"].aliases, models["smollm2"].secret_env) == (["default"], SECRET)
    assert models["gpt-4o-mini"].key_env == "OPENAI_API_KEY"


def test_a_certificate_is_where_the_file_says() -> None:
    (text,) = (text for key, text in config_files("public").items() if key.endswith("/gateway.yaml"))
    container = _gateway_container("public")
    (folder,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "tls")
    assert Path(yaml.safe_load(text)["tls_cert"]).parent == Path(folder)
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_replicas_serve_with_a_certificate_that_gateways_and_the_controller_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = fleet("tls", tmp_path, monkeypatch)
    trust = controller.replica_tls
    assert (trust.ca_file, trust.server_name) == ("/run/penstock/replica-tls/ca.crt", "penstock-replica.serving.svc")
    models = gateway("tls", tmp_path, monkeypatch).pools()
    assert {(one.ca_file, one.server_name) for one in models.values()} == {(trust.ca_file, trust.server_name)}
    chat = controller.pool_settings()["chat"]
    spec = ReplicaSpec("a", "chat", replica_settings("chat", chat, controller.slo))
    started = render_pod(controller.name, spec, controller.kubernetes.of_pool("chat", chat.kubernetes), 600.0)
    files = replicas("tls", tmp_path)["penstock-embed"].server, spec.settings.server
    for server, pod in zip(files, (pods("tls")["penstock-embed"], started), strict=True):
        (container,) = pod["spec"]["containers"]
        (folder,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "replica-tls")
        assert {str(Path(str(path)).parent) for path in (server.tls_cert, server.tls_key)} == {folder}
        assert [one["name"] for one in container["ports"]] == ["https"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert (container[probe]["httpGet"]["scheme"], container[probe]["httpGet"]["port"]) == ("HTTPS", "https")
    assert spec.settings.server.drain_timeout_s == 60
    for name in ("penstock-gateway", "penstock-fleet"):
        (volume,) = (one for one in pods("tls")[name]["spec"]["volumes"] if one["name"] == "replica-tls")
        assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]  # and not the private key
    (monitor,) = of_kind("tls", "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["tlsConfig"]["serverName"]) == ("https", trust.server_name)


def test_endpoint_picker_reads_the_gateways_file_with_its_own_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod,) = (pod for key, pod in pods("envoy").items() if key.endswith("-epp"))
    (container,) = pod["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "x"))
    path = tmp_path / "epp.yaml"
    path.write_text(config_files("envoy")["penstock-epp/epp.yaml"])
    with endpoint_picker_settings(path, {}) as settings:
        picking, ports = settings.endpoint_picker, {one["name"]: one["containerPort"] for one in container["ports"]}
    found = {"ext-proc": picking.port, "health": picking.health_port, "metrics": settings.admin_port}
    assert (found, picking.host, settings.admin_host) == (ports, "0.0.0.0", "0.0.0.0")
    assert (settings.tls_cert, picking.tls_cert, picking.max_fallbacks) == (None, "/run/penstock/tls/tls.crt", 1)
    assert settings.models == gateway("envoy", tmp_path, monkeypatch).models


def _gateway_container(name: str) -> dict[str, object]:
    (pod,) = (pod for key, pod in pods(name).items() if key.endswith("-gateway"))
    (container,) = pod["spec"]["containers"]
    return container
