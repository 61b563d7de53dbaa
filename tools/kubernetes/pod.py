"""The life of a pod on a node of the test cluster, as a kubelet leads it: start, probes, restarts, status and its end.

The pod goes on while the API server is away; what has changed meanwhile is told when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from tools.kubernetes.api import STRATEGIC, UNAVAILABLE, Api, ApiError, Object
from tools.kubernetes.container import Container
from tools.kubernetes.probes import ContainerCalls, watch_probe
from tools.kubernetes.volumes import PodValues, expand, mounts_of

log = logging.getLogger("node_agent")

ENTRY_POINT = ["penstock"]  # the image's, where a pod names no command
HOME = "/home/penstock"
_RETRY_S = 0.5
_MAX_BACKOFF_S = 10.0


@dataclass(frozen=True)
class Host:
    """The things that a node gives its pods."""

    api: Api
    http: aiohttp.ClientSession
    directory: Path
    address: str
    environment: dict[str, str]  # the image's
    kernels: Path  # compiled ones, which an image would have

    @property
    def disk(self) -> Path:
        return self.directory / "disk"


@dataclass
class ContainerLife:
    """One container through all its restarts."""

    pod: Pod
    spec: Object
    is_init: bool = False
    restarts: int = 0
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Object = field(default_factory=dict)
    has_started: bool = False  # its startup probe has succeeded
    is_ready: bool = False
    container: Container | None = None
    calls: ContainerCalls | None = None

    async def run(self) -> int:
        """Its exit code, when it has ended for good."""
        wait_s = _RETRY_S
        while True:
            code = await self._run_once()
            policy = "OnFailure" if self.is_init else self.pod.spec.get("restartPolicy", "Always")
            if self.pod.is_ending or policy == "Never" or (policy == "OnFailure" and code == 0):
                return code
            self.last_state, self.state = self.state, {"waiting": {"reason": "CrashLoopBackOff"}}
            self.pod.tell()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_BACKOFF_S)
            self.restarts += 1

    async def stop(self, deadline: float) -> None:
        """Hook, SIGTERM, and SIGKILL at the deadline, which is a time of the event loop."""
        loop = asyncio.get_running_loop()
        if self.container is None or not self.container.is_running:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                hook = self.spec.get("lifecycle", {}).get("preStop")
                if hook and self.calls is not None:
                    await self.calls.call(hook, max(0.0, deadline - loop.time()))
                await self.container.signal(signal.SIGTERM)
                await self.container.wait()
        await self.kill()

    async def kill(self) -> None:
        if self.container is not None and self.container.is_running:
            await self.container.signal(signal.SIGKILL)
            await self.container.wait()

    def status(self) -> Object:
        found = {"name": self.spec["name"], "image": self.spec["image"], "imageID": "", "restartCount": self.restarts}
        return (
            found
            | {"ready": self.is_ready, "state": self.state, "lastState": self.last_state}
            | ({} if self.is_init else {"started": self.has_started})
        )

    async def _run_once(self) -> int:
        self.container = await self._create()
        began = now()
        self.state = {"running": {"startedAt": began}}
        self.has_started = "startupProbe" not in self.spec
        self.is_ready = self.has_started and "readinessProbe" not in self.spec
        self.pod.tell()
        probes = asyncio.create_task(self._probe())
        try:
            code = await self.container.wait()
        finally:
            probes.cancel()
        self.is_ready = self.has_started = False
        reason = "Completed" if code == 0 else "Error"
        self.state = {
            "terminated": {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()},
        }
        if self.is_init:
            self.is_ready = code == 0
        self.pod.tell()
        return code

    async def _create(self) -> Container:
        """Starts its process. What it refers to may come later than the pod."""
        values, name = self.pod.values, self.spec["name"]
        while True:
            try:
                volumes = await values.volumes(self.pod.directory / "volumes", self.pod.host.disk)
                own = await values.environment(self.spec)
                break
            except (ApiError, KeyError, *UNAVAILABLE) as error:
                self.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)[:500]}}
                self.pod.tell()
                await asyncio.sleep(_RETRY_S)
        directory = self.pod.directory / "containers" / f"{name}-{self.restarts}"
        home = self.pod.directory / "home"
        (home / ".cache" / "penstock").mkdir(parents=True, exist_ok=True)
        environment = {"HOME": HOME, "HOSTNAME": self.pod.name, **self.pod.host.environment, **own}
        mounts = {HOME: home, **mounts_of(self.spec, volumes)}
        self._seed(environment, mounts)
        words = (self.spec.get("command") or ENTRY_POINT) + self.spec.get("args", [])
        command = [values.local(expand(word, environment)) for word in words]
        found = Container(directory, self.pod.name, mounts)
        self.calls = ContainerCalls(self.spec, found, self.pod.address, self.pod.host.http)
        workdir = self.spec.get("workingDir", HOME)
        await found.start(command, environment, workdir, self.pod.directory / f"{name}.log")
        return found

    def _seed(self, environment: dict[str, str], mounts: dict[str, Path]) -> None:
        """Compiled kernels are in the image's home of penstock; a home on a volume begins with them too."""
        inside = Path(environment.get("PENSTOCK_HOME", f"{environment['HOME']}/.cache/penstock"))
        for path, source in mounts.items():
            if inside.is_relative_to(path):
                inside = source / inside.relative_to(path)
                break
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            (inside / "kernels").symlink_to(self.pod.host.kernels)

    async def _probe(self) -> None:
        assert self.calls is not None
        if "startupProbe" in self.spec:
            started = asyncio.Event()

            def tell(succeeded: bool) -> None:
                started.set() if succeeded else self.pod.spawn(self._restart("startup"))

            startup = asyncio.create_task(watch_probe(self.spec["startupProbe"], self.calls.call, tell))
            try:
                await started.wait()
            finally:
                startup.cancel()
        self.has_started = True
        self.is_ready = "readinessProbe" not in self.spec
        self.pod.tell()
        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in self.spec:
                group.create_task(watch_probe(self.spec["readinessProbe"], self.calls.call, self._set_ready))
            if "livenessProbe" in self.spec:

                def check(succeeded: bool) -> None:
                    if not succeeded:
                        self.pod.spawn(self._restart("liveness"))

                group.create_task(watch_probe(self.spec["livenessProbe"], self.calls.call, check))

    def _set_ready(self, succeeded: bool) -> None:
        self.is_ready = succeeded
        self.pod.tell()

    async def _restart(self, probe: str) -> None:
        log.warning("%s: %s: the %s probe has failed: it is stopped", self.pod.name, self.spec["name"], probe)
        grace_s = self.pod.spec.get("terminationGracePeriodSeconds", 30)
        await self.stop(asyncio.get_running_loop().time() + grace_s)


class Pod:
    """Belongs to the node agent's event loop."""

    def __init__(self, host: Host, manifest: Object, address: str) -> None:
        meta = manifest["metadata"]
        self.host = host
        self.spec: Object = manifest["spec"]
        self.name: str = meta["name"]
        self.uid: str = meta["uid"]
        self.address = address
        self.directory = host.directory / "pods" / f"{meta['namespace']}_{self.name}_{self.uid[:8]}"
        self.values = PodValues(host.api, manifest, address, host.address)
        self._path = f"/api/v1/namespaces/{meta['namespace']}/pods/{self.name}"
        before = {one["name"]: one["restartCount"] + 1 for one in manifest["status"].get("containerStatuses", ())}
        self._inits = [ContainerLife(self, one, is_init=True) for one in self.spec.get("initContainers", ())]
        self._containers = [
            ContainerLife(self, one, restarts=before.get(one["name"], 0)) for one in self.spec["containers"]
        ]
        self._phase = "Pending"
        self._began = now()
        self._changed = asyncio.Event()
        self._told_to_end = asyncio.Event()
        self._deadline = float("inf")
        self._is_gone = False
        self._since: dict[str, tuple[bool, str]] = {}  # conditions, and when they changed
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_ending(self) -> bool:
        return self._told_to_end.is_set()

    def tell(self) -> None:
        """Something has changed."""
        self._changed.set()

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, grace_s: float) -> None:
        """It was deleted, and has so long; a second call may shorten that."""
        self._deadline = min(self._deadline, asyncio.get_running_loop().time() + grace_s)
        self._told_to_end.set()

    def vanish(self) -> None:
        """Its object is gone: nobody waits for it."""
        self._is_gone = True
        self.end(0.0)

    async def run(self) -> None:
        """Runs until its object is gone and nothing of it runs."""
        self.directory.mkdir(parents=True)
        publisher = asyncio.create_task(self._publish())
        life = asyncio.create_task(self._live())
        told = asyncio.create_task(self._told_to_end.wait())
        try:
            await asyncio.wait([life, told], return_when=asyncio.FIRST_COMPLETED)
            await told
            await asyncio.gather(*(one.stop(self._deadline) for one in self._lives))
            life.cancel()
            await asyncio.wait([life])
            publisher.cancel()
            await self._remove()
        finally:
            for task in (publisher, life, told, *self._tasks):
                task.cancel()
            await asyncio.gather(*(one.kill() for one in self._lives))
            for name in ("containers", "volumes", "home"):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    @property
    def _lives(self) -> list[ContainerLife]:
        return self._inits + self._containers

    async def _live(self) -> None:
        self.tell()
        for one in self._inits:
            if await one.run() != 0:
                self._phase = "Failed"
                self.tell()
                return
        self._phase = "Running"
        codes = await asyncio.gather(*(one.run() for one in self._containers))
        self._phase = "Failed" if any(codes) else "Succeeded"
        self.tell()

    async def _publish(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not await self._tried(self._patch_status):
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    async def _remove(self) -> None:
        """Tells how it ended, then deletes its object."""
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        steps = [self._patch_status, lambda: self.host.api.delete(self._path, **options)]
        while steps and not self._is_gone:
            if await self._tried(steps[0]):
                steps.pop(0)
            else:
                await asyncio.sleep(_RETRY_S)

    async def _patch_status(self) -> None:
        await self.host.api.patch(f"{self._path}/status", self._status(), STRATEGIC)

    async def _tried(self, call: Callable[[], Any]) -> bool:
        """False: the API server is not there, or busy."""
        try:
            await call()
        except UNAVAILABLE:
            return False
        except ApiError as error:
            if error.status == 429 or error.status >= 500:
                return False
            if error.status not in (404, 409):  # it is gone, or another one has its name
                log.warning("%s: %s", self.name, error)
        return True

    def _status(self) -> Object:
        is_ready = self._phase == "Running" and all(one.is_ready for one in self._containers)
        conditions = {
            "Initialized": all(one.is_ready for one in self._inits),
            "ContainersReady": is_ready,
            "Ready": is_ready,
        }
        for name, value in conditions.items():
            if self._since.get(name, (None, ""))[0] != value:
                self._since[name] = (value, now())
        return {
            "metadata": {"uid": self.uid},
            "status": {
                "phase": self._phase,
                "podIP": self.address,
                "podIPs": [{"ip": self.address}],
                "hostIP": self.host.address,
                "startTime": self._began,
                "conditions": [
                    {"type": name, "status": str(value), "lastTransitionTime": at}
                    for name, (value, at) in self._since.items()
                ],
                "initContainerStatuses": [one.status() for one in self._inits],
                "containerStatuses": [one.status() for one in self._containers],
            },
        }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
