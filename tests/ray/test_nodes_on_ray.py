"""`penstock fleet` on Ray with a replica that is too large for a node: two nodes have it together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tools.drills.fleet_stand import PATIENCE_S, RealFleet, real_fleet, wait_for_service

from tests.cli.real_server import write_tiny_model
from tests.ray.real_cluster import RealRay, engine_of, has_ended, real_ray
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.drill]

_NODE = {"CPU": 1, "GPU": 1}


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[RealRay]:
    """Two nodes, each with half of the GPUs that a replica takes."""
    (tmp_path / "ray").mkdir()
    with real_ray(tmp_path / "ray") as found:
        for _ in range(2):
            found.add_node(_NODE)
        yield found


@pytest.fixture
def fleet(ray: RealRay, tmp_path: Path) -> Iterator[RealFleet]:
    """One replica of two ranks. Nothing says that it has two nodes."""
    model = tmp_path / "tiny"
    model.mkdir()
    write_tiny_model(model)
    settings = {"driver": "ray", "address": ray.address, "ray": {"cpus": 1}, "driver_timeout_s": PATIENCE_S}
    engine = {"load": "dummy", "dtype": "float32", "tp": 2, "threads": 1, "max_loras": 0, "device": "cpu"}
    with real_fleet(tmp_path, model, settings=settings, min=1, max=1, gpus=2, engine=engine) as found:
        found.start_controller()
        eventually(found.active, lambda active: len(active) == 1, within_s=PATIENCE_S)
        wait_for_service(found)
        yield found


def nodes_of_engine(master: str) -> dict[int, psutil.Process]:
    """Processes of `penstock engine` that were told to meet there, by node."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if master in words and "--node-rank" in words:
            found[int(words[words.index("--node-rank") + 1])] = process
    return found


def master_of(url: str) -> str:
    words = engine_of(url).cmdline()
    return words[words.index("--master-addr") + 1]


def test_a_replica_over_two_nodes_serves_and_is_replaced_as_one(ray: RealRay, fleet: RealFleet) -> None:
    ((lost, url),) = fleet.active().items()
    nodes = nodes_of_engine(master_of(url))
    assert sorted(nodes) == [0, 1]
    assert fleet.chat() == 200
    taken = next(node for node, view in ray.nodes.items() if _holds(view, nodes[1]))
    ray.add_node(_NODE)
    ray.lose_node(taken)
    eventually(fleet.active, lambda active: len(active) == 1 and lost not in active, within_s=PATIENCE_S)
    eventually(lambda: [one for one in nodes.values() if not has_ended(one)], lambda left: not left)
    eventually(fleet.chat, lambda status: status == 200, within_s=PATIENCE_S)
    replaced = nodes_of_engine(master_of(fleet.active().popitem()[1]))
    assert sorted(replaced) == [0, 1]
    controller = fleet.controllers.pop()
    controller.terminate()
    controller.wait()
    fleet.run("fleet", "down", "--config", str(fleet.config))
    assert all(has_ended(one) for one in replaced.values())


def _holds(node: object, process: psutil.Process) -> bool:
    """Whether an engine's actor was started by this node's raylet."""
    raylet = node.all_processes["raylet"][0].process.pid  # type: ignore[attr-defined]
    return raylet in {one.pid for one in process.parents()}
