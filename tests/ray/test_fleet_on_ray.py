"""`penstock fleet` on Ray as an operator runs it: a real controller and gateway, replicas on a real cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tools.drills.fleet_stand import PATIENCE_S, RealFleet, real_fleet, wait_for_service

from tests.cli.real_server import write_tiny_model
from tests.ray.real_cluster import RealRay, engine_of, has_ended, real_ray
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.drill]

_NODE = {"CPU": 2, "GPU": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRay]:
    """A cluster with one node in each of two zones."""
    with real_ray(tmp_path_factory.mktemp("ray")) as found:
        for zone in ("a", "b"):
            found.add_node(_NODE | {f"zone:{zone}": 1000})
        yield found


@pytest.fixture
def fleet(ray: RealRay, model: Path, tmp_path: Path) -> Iterator[RealFleet]:
    """Two replicas with a GPU each."""
    settings = {"driver": "ray", "address": ray.address, "ray": {"cpus": 1}, "driver_timeout_s": PATIENCE_S}
    with real_fleet(tmp_path, model, settings=settings, min=2, max=3, gpus=1, zones=["a", "b"]) as found:
        found.start_controller()
        eventually(found.active, lambda active: len(active) == 2, within_s=PATIENCE_S)
        wait_for_service(found)
        yield found


def zones(fleet: RealFleet) -> list[str]:
    replicas = fleet.replicas()
    return sorted(replicas[name].zone for name in fleet.active())


def change(fleet: RealFleet, **pool: object) -> None:
    """Other settings of the pool, for the next controller."""
    settings = json.loads(fleet.config.read_text())
    for one in settings["pools"].values():
        one |= pool
    fleet.config.write_text(json.dumps(settings))


def stop_controller(fleet: RealFleet) -> None:
    controller = fleet.controllers.pop()
    controller.kill()
    controller.wait()


def test_replicas_are_spread_over_zones_and_outlive_their_controller(fleet: RealFleet) -> None:
    assert zones(fleet) == ["a", "b"]
    before = fleet.active()
    engines = {url: engine_of(url).pid for url in before.values()}
    assert all("CUDA_VISIBLE_DEVICES" in psutil.Process(pid).environ() for pid in engines.values())
    stop_controller(fleet)
    assert fleet.chat() == 200
    change(fleet, min=3)
    fleet.start_controller()
    eventually(fleet.active, lambda active: len(active) == 3, within_s=PATIENCE_S)
    assert fleet.active().items() >= before.items()
    assert {url: engine_of(url).pid for url in before.values()} == engines

    stop_controller(fleet)
    change(fleet, min=1, max=1)
    fleet.start_controller()
    eventually(fleet.replicas, lambda found: len(found) == 1, within_s=PATIENCE_S)
    assert fleet.chat() == 200


def test_an_engine_or_an_actor_that_dies_is_replaced(fleet: RealFleet) -> None:
    first, second = fleet.active().items()
    engine_of(first[1]).kill()
    engine = engine_of(second[1])
    psutil.Process(engine.ppid()).kill()
    gone = {first[0], second[0]}
    eventually(fleet.active, lambda active: len(active) == 2 and not gone & set(active), within_s=PATIENCE_S)
    assert has_ended(engine)
    eventually(fleet.chat, lambda status: status == 200)


def test_a_drained_node_is_replaced_before_it_goes(ray: RealRay, fleet: RealFleet) -> None:
    node = ray.add_node(_NODE | {"zone:c": 1000})
    stop_controller(fleet)
    change(fleet, zones=["a", "b", "c"], min=3, max=4)
    fleet.start_controller()
    eventually(lambda: zones(fleet), lambda found: found == ["a", "b", "c"], within_s=PATIENCE_S)
    (leaving,) = [name for name, one in fleet.replicas().items() if one.zone == "c"]
    ray.drain_node(node, time.time() + 10 * PATIENCE_S)
    eventually(fleet.active, lambda active: len(active) == 3 and leaving not in active, within_s=PATIENCE_S)
    assert fleet.chat() == 200
    ray.lose_node(node)


def test_a_lost_node_is_replaced_and_leaves_no_engine_behind(ray: RealRay, fleet: RealFleet) -> None:
    node = ray.add_node(_NODE | {"zone:d": 1000})
    stop_controller(fleet)
    change(fleet, zones=["a", "b", "d"], min=3, max=4)
    fleet.start_controller()
    eventually(lambda: zones(fleet), lambda found: found == ["a", "b", "d"], within_s=PATIENCE_S)
    (lost,) = [name for name, one in fleet.replicas().items() if one.zone == "d"]
    engine = engine_of(fleet.active()[lost])
    ray.lose_node(node)
    eventually(fleet.active, lambda active: len(active) == 3 and lost not in active, within_s=PATIENCE_S)
    assert has_ended(engine)
    eventually(fleet.chat, lambda status: status == 200)


def test_service_goes_on_without_a_head_and_so_does_the_fleet_when_it_is_back(ray: RealRay, fleet: RealFleet) -> None:
    before = fleet.active()
    engines = {url: engine_of(url).pid for url in before.values()}
    ray.kill_head()
    eventually(
        lambda: fleet.run("fleet", "status"), lambda said: "cannot list its replicas" in said, within_s=PATIENCE_S
    )
    assert fleet.chat() == 200
    assert fleet.active() == before
    ray.start_head()
    eventually(lambda: fleet.run("fleet", "status"), lambda said: "cannot list" not in said, within_s=PATIENCE_S)
    assert {url: engine_of(url).pid for url in fleet.active().values()} == engines

    lost = next(iter(before))
    engine_of(before[lost]).kill()
    eventually(fleet.active, lambda active: len(active) == 2 and lost not in active, within_s=PATIENCE_S)
    assert fleet.chat() == 200


def test_what_there_is_no_room_for_is_refused_and_said(fleet: RealFleet) -> None:
    stop_controller(fleet)
    change(fleet, gpus=2, min=3, max=3)
    fleet.start_controller()
    eventually(
        lambda: fleet.run("fleet", "status"), lambda said: "Ray has no node with room for" in said, within_s=PATIENCE_S
    )
    assert len(fleet.active()) == 2
    assert fleet.chat() == 200


def test_more_gpus_than_one_node_has_are_refused_with_what_would_work(fleet: RealFleet) -> None:
    """Two nodes have as many together, and an engine is on one. The replicas that serve stay."""
    stop_controller(fleet)
    change(fleet, gpus=4, min=3, max=3)
    fleet.start_controller()
    eventually(
        lambda: fleet.run("fleet", "status"),
        lambda said: "has more than 2 GPUs: `gpus: 2` would fit, or add a node with 4" in said,
        within_s=PATIENCE_S,
    )
    assert len(fleet.active()) == 2
    assert fleet.chat() == 200
