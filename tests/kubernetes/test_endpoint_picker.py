"""The chart's Endpoint Picker on a real control plane: its pod is asked as Envoy asks, and a replica answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from functools import partial

import pytest
from tools.kubernetes.api import Object

from tests.deploy.custom_resources import CRD
from tests.gateway.endpoint_picker.fake_envoy import FakeEnvoy
from tests.kubernetes.namespaces import address, until
from tests.kubernetes.releases import POOL, Release

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.asyncio(loop_scope="module")]

GROUP = "inference.networking.k8s.io"
ENVOY = {"networkPolicy": {"envoyFrom": [{"podSelector": {}}]}}
ASKED = {"model": POOL, "prompt": "the first", "max_tokens": 5, "temperature": 0}


async def test_endpoint_picker_of_the_chart_sends_envoy_to_a_pod_of_the_inference_pool(release: Release) -> None:
    cluster, ns = release.cluster, release.ns
    await asyncio.to_thread(cluster.kubectl, "apply", "-f", str(CRD))
    await asyncio.to_thread(
        cluster.kubectl, "wait", "--for=condition=established", "--timeout=60s", "crd/inferencepools." + GROUP
    )
    small = {"requests": {"cpu": "10m", "memory": "64Mi"}}
    await release.install(
        release.pool(min=1, max=1),
        more=ENVOY | {"endpointPicker": {"enabled": True, "replicas": 2, "resources": small}},
    )
    (replica,) = (await release.settled(1)).values()
    found = json.loads(
        await asyncio.to_thread(cluster.kubectl, "get", "infpool", "penstock", "-n", ns.name, "-o", "json")
    )
    spec = found["spec"]
    pods = (await ns.pods(**spec["selector"]["matchLabels"])).values()
    endpoints = [f"{address(pod)}:{port['number']}" for pod in pods for port in spec["targetPorts"]]
    assert [f"http://{one}" for one in endpoints] == [replica.url]
    pickers = await until(lambda: ns.ready(**{"app.kubernetes.io/component": "epp"}), lambda ready: len(ready) == 2)
    for pod in pickers.values():
        ask = partial(asyncio.to_thread, _ask, address(pod), spec["endpointPickerRef"]["port"]["number"])
        _, answer, picked = await until(ask, lambda seen: seen[0] == 200)  # 503 until the replica is known
        assert picked == endpoints
        assert answer["usage"]["completion_tokens"] == 5


def _ask(host: str, port: int) -> tuple[int, Object, list[str]]:
    """Status, answer and endpoints of one request through an Endpoint Picker whose certificate signs itself."""
    certificate = ssl.get_server_certificate((host, port)).encode()
    with contextlib.closing(FakeEnvoy(port, certificate, "penstock-epp", host)) as envoy:
        request = envoy.ask(ASKED)
        answer = request.forward()
        return answer.status, answer.json, request.endpoints
