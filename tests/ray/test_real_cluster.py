"""A real Ray cluster keeps the contract that the fake does; and no engine outlives its actor or raylet."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.fleet.drivers.ray_cluster import EngineOrder
from penstock.fleet.drivers.ray_process import RayProcess
from tests.cli.real_server import write_tiny_model
from tests.ray.contract import PATIENCE_S, RayClusterContract, until
from tests.ray.real_cluster import ENVIRONMENT, RealRay, RealStage, engine_of, has_ended, real_ray
from tests.waiting import GIVE_UP_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.drill]


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRay]:
    with real_ray(tmp_path_factory.mktemp("ray")) as found:
        yield found


@pytest.fixture
async def stage(ray: RealRay, tmp_path: Path) -> AsyncIterator[RealStage]:
    found = RealStage(ray, tmp_path / "ray.log")
    yield found
    await found.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_tiny_model(path)
    return path


@pytest.fixture
def order(model: Path) -> EngineOrder:
    return order_of(model)


@pytest.fixture
def wide_order(model: Path) -> EngineOrder:
    return order_of(model, tp=2, max_loras=0, device="cpu")


def order_of(model: Path, **more: object) -> EngineOrder:
    engine = {"load": "dummy", "dtype": "float32", "threads": 1, **more}
    return EngineOrder(json.dumps({"model": str(model), "engine": engine}), "secret")


class TestRealRayCluster(RayClusterContract):
    """Tests of the contract."""


async def test_an_engine_ends_when_its_raylet_is_killed(ray: RealRay, stage: RealStage, order: EngineOrder) -> None:
    bundle = {"CPU": 1.0, "here": 0.001}
    node = await stage.add_node({"CPU": 1, "here": 1})
    assert await stage.create_group("here/r", [bundle], GIVE_UP_S)
    await stage.start_engine("here/r", [bundle], order)
    view = await until(lambda: stage.view("here/"), lambda view: view.groups[0].actor.url)
    engine = engine_of(view.groups[0].actor.url)
    processes = [engine, engine.parent(), *engine.children(recursive=True)]
    ray.kill_raylet(node)
    eventually(lambda: [one for one in processes if not has_ended(one)], lambda found: not found, within_s=PATIENCE_S)
    await until(lambda: stage.view("here/"), lambda view: view.groups[0].actor.failure)
    await stage.remove_group("here/r")


async def test_the_secret_is_neither_in_the_engines_arguments_nor_in_what_ray_keeps(
    ray: RealRay, stage: RealStage, order: EngineOrder, tmp_path: Path
) -> None:
    bundle = {"CPU": 1.0, "there": 0.001}
    await stage.add_node({"CPU": 1, "there": 1})
    secret = "a-secret-that-nobody-prints"
    assert await stage.create_group("there/r", [bundle], GIVE_UP_S)
    await stage.start_engine("there/r", [bundle], EngineOrder(order.config, secret))
    view = await until(lambda: stage.view("there/"), lambda view: view.groups[0].actor.url)
    assert secret not in " ".join(engine_of(view.groups[0].actor.url).cmdline())
    assert b"there/r" in ray.kept()
    assert secret.encode() not in ray.kept()
    assert not [path for path in ray.logs() if secret.encode() in path.read_bytes()]
    await stage.remove_group("there/r")


async def test_fleets_of_one_name_in_two_namespaces_do_not_see_each_other(
    ray: RealRay, stage: RealStage, tmp_path: Path
) -> None:
    await stage.add_node({"CPU": 2, "shared": 1})
    bundle = {"CPU": 1.0, "shared": 0.001}
    other = RayProcess(ray.address, "another", tmp_path / "other.log")
    try:
        for cluster in (stage, other):
            assert await cluster.create_group("penstock/same/r", [bundle], GIVE_UP_S)
        assert len((await stage.view("penstock/same/")).groups) == 1
        await stage.remove_group("penstock/same/r")
        assert not (await stage.view("penstock/same/")).groups
        assert len((await other.view("penstock/same/")).groups) == 1
        await other.remove_group("penstock/same/r")
    finally:
        await other.close()


_CONTROLLER = """
import asyncio, sys
from pathlib import Path
from penstock.fleet.drivers.ray_process import RayProcess
asyncio.run(RayProcess(sys.argv[1], "penstock", Path(sys.argv[2])).view("penstock/"))
"""


def test_a_bridge_ends_with_its_controller_while_it_connects(tmp_path: Path) -> None:
    """Ray tries for minutes to connect to a head that takes connections and says nothing."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    with socket.create_server(("127.0.0.1", 0)) as head:
        head.settimeout(GIVE_UP_S)
        address = f"127.0.0.1:{head.getsockname()[1]}"
        command = [sys.executable, "-c", _CONTROLLER, address, str(tmp_path / "ray.log")]
        controller = subprocess.Popen(command, env=os.environ | ENVIRONMENT)
        try:
            connections = [head.accept()[0] for _ in range(2)]  # the first is to see that something listens
            (bridge,) = psutil.Process(controller.pid).children()
        finally:
            controller.kill()
            controller.wait()
        eventually(lambda: has_ended(bridge))
        for one in connections:
            one.close()
