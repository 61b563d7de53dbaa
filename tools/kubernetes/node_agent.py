"""A node of the test cluster: a kubelet for tests, which runs the containers of its pods as processes of this machine.

    python -m tools.kubernetes.node_agent '{"url": …, "token": …, "name": "a1", "network": 77, "number": 1, …}'

It makes the Node object, renews its lease, and runs what is bound to it. Images are ignored: `penstock` in a pod's
command is this checkout's. When the agent dies, all its pods' processes die with it: so does a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import psutil
from tools.kubernetes.api import STRATEGIC, UNAVAILABLE, Api, ApiError, Object
from tools.kubernetes.pod import Host, Pod, now

from penstock.hub.home import penstock_home

log = logging.getLogger("node_agent")

ROOT = Path(__file__).parent.parent.parent
_HEARTBEAT_S = 1.0
_RETRY_S = 0.5


@dataclass(frozen=True)
class NodeSettings:
    url: str
    token: str
    directory: str
    network: int  # the cluster's: pods have addresses 127.NETWORK.NUMBER.x
    number: int
    name: str
    zone: str = ""
    cpus: int = 64
    gpus: int = 0  # pretended
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[dict[str, str]] = field(default_factory=list)

    def address(self, host: int) -> str:
        return f"127.{self.network}.{self.number}.{host}"


class NodeAgent:
    def __init__(self, settings: NodeSettings, host: Host) -> None:
        self._settings = settings
        self._host = host
        self._api = host.api
        self._path = f"/api/v1/nodes/{settings.name}"
        self._pods: dict[str, tuple[Pod, asyncio.Task[None]]] = {}  # by UID
        self._numbers = itertools.cycle(range(2, 255))

    async def run(self) -> None:
        """Runs until it is cancelled; then its pods' processes are killed."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._follow())
        finally:
            tasks = [task for _, task in self._pods.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        is_registered = False
        while True:
            try:
                if not is_registered:
                    await self._register()
                    is_registered = True
                await self._report()  # the control plane may have called it lost meanwhile
                await self._renew()
            except UNAVAILABLE as error:
                log.info("the API server is away: %r", error)
            except ApiError as error:
                log.warning("heartbeat: %s", error)
                is_registered = is_registered and error.status != 404
            await asyncio.sleep(_HEARTBEAT_S)

    async def _register(self) -> None:
        settings = self._settings
        labels = {"kubernetes.io/hostname": settings.name, "kubernetes.io/os": "linux", **settings.labels}
        if settings.zone:
            labels["topology.kubernetes.io/zone"] = settings.zone
        meta = {"name": settings.name, "labels": labels}
        try:
            await self._api.create("/api/v1/nodes", {"metadata": meta, "spec": {"taints": settings.taints}})
        except ApiError as error:
            if error.status != 409:
                raise
            await self._api.patch(self._path, {"metadata": meta})

    async def _report(self) -> None:
        settings = self._settings
        room = {"cpu": str(settings.cpus), "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "200"}
        if settings.gpus:
            room["nvidia.com/gpu"] = str(settings.gpus)
        healthy = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True"}
        status = {
            "capacity": room,
            "allocatable": room,
            "addresses": [{"type": "InternalIP", "address": self._host.address}],
            "conditions": [
                {
                    "type": name,
                    "status": value,
                    "reason": "Agent",
                    "lastHeartbeatTime": now(),
                    "lastTransitionTime": now(),
                }
                for name, value in healthy.items()
            ],
        }
        await self._api.patch(f"{self._path}/status", {"status": status}, STRATEGIC)

    async def _renew(self) -> None:
        path, name = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", self._settings.name
        renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": renewed}
        try:
            await self._api.patch(f"{path}/{name}", {"spec": spec})
        except ApiError as error:
            if error.status != 404:
                raise
            await self._api.create(path, {"metadata": {"name": name}, "spec": spec})

    async def _follow(self) -> None:
        """Lists the node's pods and watches them, again and again."""
        query = {"fieldSelector": f"spec.nodeName={self._settings.name}"}
        while True:
            try:
                listed = await self._api.get("/api/v1/pods", **query)
                self._reconcile(listed["items"])
                async for event in self._api.watch("/api/v1/pods", listed["metadata"]["resourceVersion"], **query):
                    if event["type"] == "DELETED":
                        self._forget(event["object"]["metadata"]["uid"])
                    else:
                        self._see(event["object"])
            except UNAVAILABLE as error:
                log.info("the API server is away: %r", error)
            except ApiError as error:
                log.warning("pods: %s", error)
            await asyncio.sleep(_RETRY_S)

    def _reconcile(self, pods: list[Object]) -> None:
        for uid in self._pods.keys() - {one["metadata"]["uid"] for one in pods}:
            self._forget(uid)
        for one in pods:
            self._see(one)

    def _see(self, manifest: Object) -> None:
        meta = manifest["metadata"]
        uid = meta["uid"]
        if uid not in self._pods:
            if manifest["status"].get("phase") in ("Succeeded", "Failed") and "deletionTimestamp" not in meta:
                return
            pod = Pod(self._host, manifest, self._free_address())
            task = asyncio.create_task(pod.run())
            self._pods[uid] = pod, task
            task.add_done_callback(lambda done: self._ended(uid, pod, done))
        if "deletionTimestamp" in meta:
            self._pods[uid][0].end(meta.get("deletionGracePeriodSeconds", 0))

    def _forget(self, uid: str) -> None:
        if uid in self._pods:
            self._pods[uid][0].vanish()

    def _ended(self, uid: str, pod: Pod, task: asyncio.Task[None]) -> None:
        self._pods.pop(uid, None)
        if not task.cancelled() and (error := task.exception()):
            log.error("pod %s", pod.name, exc_info=error)

    def _free_address(self) -> str:
        taken = {pod.address for pod, _ in self._pods.values()}
        return next(address for number in self._numbers if (address := self._settings.address(number)) not in taken)


async def _main(settings: NodeSettings) -> None:
    directory = Path(settings.directory)
    shutil.rmtree(directory / "pods", ignore_errors=True)  # of an agent before this one
    kernels = penstock_home() / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)  # the first pod compiles them for all
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        "PATH": programs,
        "PYTHONPATH": f"{ROOT}/src",
        "OMP_NUM_THREADS": "1",
        "KUBERNETES_SERVICE_HOST": settings.url.removeprefix("https://").partition(":")[0],
        "KUBERNETES_SERVICE_PORT": settings.url.rpartition(":")[2],
    }
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with Api(settings.url, settings.token) as api, aiohttp.ClientSession() as http:
        host = Host(api, http, directory, settings.address(1), environment, kernels)
        agent = asyncio.create_task(NodeAgent(settings, host).run())
        waiting = asyncio.create_task(told.wait())
        await asyncio.wait([agent, waiting], return_when=asyncio.FIRST_COMPLETED)
        agent.cancel()
        waiting.cancel()
        await asyncio.gather(agent, waiting, return_exceptions=True)


class Node:
    """A node agent's process, seen by a test. It must be started by the main thread: see `control_plane`."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.directory = Path(settings.directory)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        agent = [sys.executable, "-m", "tools.kubernetes.node_agent", json.dumps(asdict(self.settings))]
        with open(self.directory / "agent.log", "ab") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *agent],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        """The machine is gone: no last word, no process left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def kill_pod(self, uid: str) -> None:
        """Kills the first process of each container, and so all of them."""
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children():
            if any(f"_{uid[:8]}/" in word for word in process.cmdline()):
                for first in process.children():
                    first.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                log.warning("%s does not end: it is killed", self.name)
            self.kill()

    def logs(self) -> Iterator[tuple[str, str]]:
        """The ends of the agent's and its containers' logs, by path."""
        for path in [self.directory / "agent.log", *sorted(self.directory.glob("pods/*/*.log"))]:
            with contextlib.suppress(FileNotFoundError):
                yield str(path.relative_to(self.directory)), path.read_text(errors="replace")[-3000:]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(_main(NodeSettings(**json.loads(sys.argv[1]))))
