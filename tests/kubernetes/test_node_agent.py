"""The node agent for tests: pods of a real control plane become processes, as a kubelet would run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tools.kubernetes.api import Object
from tools.kubernetes.cluster import Cluster

from tests.kubernetes.namespaces import Namespace, address, until

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.asyncio(loop_scope="module")]

PORT = 8000
_SERVE = """
import http.server, os, pathlib, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.strip("/")
        code = 200 if name == "env" or pathlib.Path(name).exists() else 503
        self.send_response(code); self.end_headers()
        self.wfile.write(os.environ.get("SAID", "").encode() if name == "env" else b"")
    def do_POST(self):
        pathlib.Path(self.path.strip("/")).touch()
        self.send_response(200); self.end_headers()
    def do_DELETE(self):
        pathlib.Path(self.path.strip("/")).unlink()
        self.send_response(200); self.end_headers()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


def container(**fields: Any) -> Object:
    return {"name": "main", "image": "any", "command": ["python3", "-c", _SERVE], **fields}


def http_probe(path: str, **fields: int) -> Object:
    return {"httpGet": {"path": path, "port": PORT}, "periodSeconds": 1, **fields}


async def send(method: str, pod: Object, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http:
        try:
            async with http.request(method, f"http://{address(pod)}:{PORT}{path}") as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientConnectionError:
            return 0, ""


async def test_engine_pod_answers_at_its_address_and_is_drained_by_its_deletion(
    ns: Namespace, cluster: Cluster, model: Path
) -> None:
    flags = ["--load", "dummy", "--dtype", "float32", "--threads", "1", "--host", "$(POD_IP)", "--port", str(PORT)]
    engine = {
        "name": "engine",
        "image": "penstock",
        "args": ["engine", "/models/tiny", *flags],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "readinessProbe": http_probe("/ready"),
        "volumeMounts": [{"name": "model", "mountPath": "/models/tiny"}],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    volume = {"name": "model", "hostPath": {"path": str(model)}}
    grace_s = 120
    await ns.create(
        "Pod", "engine", spec={"containers": [engine], "volumes": [volume], "terminationGracePeriodSeconds": grace_s}
    )
    pod = await ns.wait_until_ready("engine")
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as http:
        url = f"http://{address(pod)}:{PORT}/v1/completions"
        async with http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.content.readuntil(b"\n\n")  # it has begun
            await ns.api.delete(ns.path("Pod", "engine"))
            rest = await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    await ns.wait_until_gone("Pod", "engine")
    assert await send("GET", pod, "/health") == (0, "")


async def test_environment_and_volumes_are_filled_in_as_kubernetes_does(ns: Namespace) -> None:
    await ns.create("Secret", "keys", stringData={"token": "s3cret"})
    await ns.create("ConfigMap", "settings", data={"color": "blue", "file.txt": "listens at 0.0.0.0"})
    script = "cat /etc/settings/file.txt > /cache/said; hostname >> /cache/said"
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "SAID", "value": "$(TOKEN) $(color) $(NODE) $(APP) $(UNKNOWN) $$(TOKEN)"},
    ]
    mounts = [{"name": "settings", "mountPath": "/etc/settings"}, {"name": "cache", "mountPath": "/cache"}]
    main = container(
        env=env,
        envFrom=[{"configMapRef": {"name": "settings"}}],
        volumeMounts=mounts,
        readinessProbe={"exec": {"command": ["sh", "-c", "grep -q filled /cache/said"]}, "periodSeconds": 1},
    )
    init = container(name="first", command=["sh", "-c", script], volumeMounts=mounts)
    volumes = [{"name": "settings", "configMap": {"name": "settings"}}, {"name": "cache", "emptyDir": {}}]
    spec = {"initContainers": [init], "containers": [main], "volumes": volumes}
    await ns.create("Pod", "filled", metadata={"labels": {"app": "demo"}}, spec=spec)
    pod = await ns.wait_until_ready("filled")
    _, said = await send("GET", pod, "/env")
    assert said == f"s3cret $(color) {pod['spec']['nodeName']} demo $(UNKNOWN) $(TOKEN)".replace("$(color)", "blue")


async def test_container_that_fails_its_liveness_probe_is_restarted(ns: Namespace) -> None:
    main = container(
        command=["sh", "-c", 'touch alive; exec "$@"', "sh", "python3", "-c", _SERVE],
        startupProbe=http_probe("/alive", failureThreshold=100),
        livenessProbe=http_probe("/alive", failureThreshold=2),
    )
    await ns.create("Pod", "restarted", spec={"containers": [main]})
    pod = await ns.wait_until_ready("restarted")
    assert (await send("DELETE", pod, "/alive"))[0] == 200
    again = await until(
        lambda: ns.get("Pod", "restarted"),
        lambda found: found is not None and found["status"]["containerStatuses"][0]["restartCount"] == 1,
    )
    assert again is not None
    assert "terminated" in again["status"]["containerStatuses"][0]["lastState"]
    await ns.wait_until_ready("restarted")


async def test_readiness_follows_its_probe(ns: Namespace) -> None:
    main = container(readinessProbe=http_probe("/open", failureThreshold=1))
    await ns.create("Pod", "gated", spec={"containers": [main]})
    pod = await until(
        lambda: ns.get("Pod", "gated"), lambda found: found is not None and found["status"]["phase"] == "Running"
    )
    assert pod is not None
    await until(lambda: send("POST", pod, "/open"), lambda answer: answer[0] == 200)
    await ns.wait_until_ready("gated")
    await send("DELETE", pod, "/open")
    await until(ns.ready, lambda found: "gated" not in found)


async def last_codes(ns: Namespace, name: str) -> dict[str, int]:
    """Deletes the pod, and returns the exit codes that it told last."""
    listed = await ns.api.get(ns.path("Pod"))
    await ns.api.delete(ns.path("Pod", name))
    async for event in ns.api.watch(ns.path("Pod"), listed["metadata"]["resourceVersion"]):
        if event["type"] == "DELETED":
            ended = event["object"]["status"]["containerStatuses"]
            return {one["name"]: one["state"]["terminated"]["exitCode"] for one in ended}
    raise AssertionError("the watch has ended")


async def test_hook_runs_before_the_signal(ns: Namespace) -> None:
    main = container(
        command=["sh", "-c", "trap 'exit $(cat hook)' TERM; touch ready; while :; do sleep 0.1; done"],
        readinessProbe={"exec": {"command": ["test", "-e", "ready"]}, "periodSeconds": 1},
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo 7 > hook"]}}},
    )
    await ns.create("Pod", "polite", spec={"containers": [main], "terminationGracePeriodSeconds": 600})
    await ns.wait_until_ready("polite")
    assert await last_codes(ns, "polite") == {"main": 7}


async def test_process_that_hears_no_signal_is_killed_after_its_grace(ns: Namespace) -> None:
    main = container(command=["sleep", "1000000"])
    await ns.create("Pod", "deaf", spec={"containers": [main], "terminationGracePeriodSeconds": 1})
    await ns.wait_until_ready("deaf")
    assert await last_codes(ns, "deaf") == {"main": 137}


async def test_pods_outlive_the_api_server_and_are_told_of_what_they_missed(ns: Namespace, cluster: Cluster) -> None:
    main = container(readinessProbe=http_probe("/open", failureThreshold=1))
    await ns.create("Pod", "lasting", spec={"containers": [main]})
    pod = await until(
        lambda: ns.get("Pod", "lasting"), lambda found: found is not None and found["status"]["phase"] == "Running"
    )
    assert pod is not None
    await until(lambda: send("GET", pod, "/env"), lambda answer: answer[0] == 200)
    with cluster.plane.without("kube-apiserver"):
        assert (await send("POST", pod, "/open"))[0] == 200
    found = await ns.wait_until_ready("lasting")
    assert found["status"]["containerStatuses"][0]["restartCount"] == 0
