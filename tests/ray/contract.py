"""The contract of `RayCluster`, as tests that the fake and a real cluster both keep."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from penstock import __version__
from penstock.core.errors import PenstockError
from penstock.fleet.drivers.ray_cluster import EngineOrder, GroupView, NodeView, RayCluster
from tests.waiting import GIVE_UP_S, eventually_async

PATIENCE_S = 3 * GIVE_UP_S  # until Ray says that a node is gone, on a busy machine
T = TypeVar("T")


class Stage(RayCluster, Protocol):
    """A cluster to which a test can do something."""

    async def add_node(self, resources: Mapping[str, float]) -> str: ...
    async def lose_node(self, node: str) -> None: ...
    async def drain_node(self, node: str, at: float) -> None: ...
    async def kill_engine(self, name: str) -> None: ...
    async def kill_actor(self, name: str) -> None: ...


class RayClusterContract:
    """The fixtures: `stage`, a cluster without anything of the test's name; `order`, an engine that serves; and
    `wide_order`, one of two ranks."""

    async def test_a_group_has_its_resources_until_it_is_removed(self, stage: Stage) -> None:
        place, bundle = await _place(stage, CPU=1, GPU=2)
        assert await stage.create_group(f"{place}/one", [bundle], GIVE_UP_S)
        assert not await stage.create_group(f"{place}/two", [bundle], 0.1)
        groups = (await stage.view(place)).groups
        assert {one.name: bool(one.nodes) for one in groups} == {f"{place}/one": True, f"{place}/two": False}
        await stage.remove_group(f"{place}/one")
        await stage.remove_group(f"{place}/one")
        assert await stage.create_group(f"{place}/two", [bundle], GIVE_UP_S)
        await stage.remove_group(f"{place}/two")
        assert not (await stage.view(place)).groups

    async def test_an_engine_is_started_once_and_is_stopped(self, stage: Stage, order: EngineOrder) -> None:
        place, bundle = await _place(stage, CPU=1, GPU=1)
        name = f"{place}/one?pool=m"
        assert await stage.create_group(name, [bundle], GIVE_UP_S)
        assert not (await _group(stage, name)).actor.is_begun
        await stage.start_engine(name, [bundle], order)
        url = (await _until(stage, name, lambda one: one.actor.url)).actor.url
        assert await stage.create_group(name, [bundle], GIVE_UP_S)
        await stage.start_engine(name, [bundle], order)
        assert (await _group(stage, name)).actor.url == url
        await stage.stop_engine(name, 10.0)
        await _until(stage, name, lambda one: one.actor.failure)
        await stage.remove_group(name)
        assert not (await stage.view(place)).groups
        await stage.stop_engine(name, 10.0)

    async def test_an_engine_that_has_ended_is_not_started_again(self, stage: Stage, order: EngineOrder) -> None:
        place, bundle = await _place(stage, CPU=1)
        name = f"{place}/one"
        assert await stage.create_group(name, [bundle], GIVE_UP_S)
        await stage.start_engine(name, [bundle], order)
        await _until(stage, name, lambda one: one.actor.url)
        await stage.kill_engine(name)
        await _until(stage, name, lambda one: one.actor.failure)
        await stage.start_engine(name, [bundle], order)
        assert (await _group(stage, name)).actor.failure
        await stage.remove_group(name)

    async def test_an_actor_that_is_killed_has_failed(self, stage: Stage, order: EngineOrder) -> None:
        place, bundle = await _place(stage, CPU=1)
        name = f"{place}/one"
        assert await stage.create_group(name, [bundle], GIVE_UP_S)
        await stage.start_engine(name, [bundle], order)
        await _until(stage, name, lambda one: one.actor.url)
        await stage.kill_actor(name)
        found = await _until(stage, name, lambda one: one.actor.failure)
        assert found.actor.is_begun
        await stage.remove_group(name)

    async def test_a_lost_node_takes_its_actors_along(self, stage: Stage, order: EngineOrder) -> None:
        place, bundle = await _place(stage, CPU=1)
        name = f"{place}/one"
        assert await stage.create_group(name, [bundle], GIVE_UP_S)
        await stage.start_engine(name, [bundle], order)
        found = await _until(stage, name, lambda one: one.actor.url)
        await stage.lose_node(found.nodes[0])
        await _until(stage, name, lambda one: one.actor.failure)
        await stage.remove_group(name)

    async def test_a_draining_node_takes_nothing_new_and_what_is_there_stays(
        self, stage: Stage, order: EngineOrder
    ) -> None:
        place, bundle = await _place(stage, CPU=2)
        half = bundle | {"CPU": 1}
        name = f"{place}/one"
        assert await stage.create_group(name, [half], GIVE_UP_S)
        await stage.start_engine(name, [half], order)
        node = (await _until(stage, name, lambda one: one.actor.url)).nodes[0]
        at = time.time() + 1000
        await stage.drain_node(node, at)
        view = await stage.view(place)
        assert abs(view.draining[node] - at) < 1.0
        found = await _node(stage, node)
        assert found.drains_at == view.draining[node]
        assert found.is_alive
        assert not found.is_usable
        assert not await stage.create_group(f"{place}/two", [half], 0.5)
        assert not (await _group(stage, name)).actor.failure
        for one in (name, f"{place}/two"):
            await stage.remove_group(one)

    async def test_a_group_over_nodes_has_a_bundle_on_each_and_is_lost_as_one(
        self, stage: Stage, wide_order: EngineOrder
    ) -> None:
        place, bundle = await _place(stage, CPU=1, GPU=2)
        name, bundles = f"{place}/one?pool=m", [bundle, bundle]
        assert not await stage.create_group(name, bundles, 0.1)
        other = await stage.add_node({"CPU": 1, "GPU": 2, place: 1000.0})
        assert await stage.create_group(name, bundles, GIVE_UP_S)
        await stage.start_engine(name, bundles, wide_order)
        found = await _until(stage, name, lambda one: one.actor.url)
        assert found.actor.is_begun
        assert len({*found.nodes}) == 2
        await stage.start_engine(name, bundles, wide_order)
        assert (await _group(stage, name)).actor.url == found.actor.url
        await stage.lose_node(other)
        lost = await _until(stage, name, lambda one: one.actor.failure)
        assert lost.actor.failure.startswith(f"node {[*found.nodes].index(other)}: ")
        await stage.remove_group(name)
        assert not (await stage.view(place)).groups

    async def test_nodes_are_listed_with_what_they_have_until_they_are_lost(self, stage: Stage) -> None:
        place = f"place-{uuid.uuid4().hex[:8]}"
        node = await stage.add_node({"CPU": 2, "GPU": 3, place: 7.0})
        found = await _node(stage, node)
        assert found.is_usable
        assert found.resources.items() >= {"CPU": 2.0, "GPU": 3.0, place: 7.0}.items()
        await stage.lose_node(node)
        found = await until(lambda: _node(stage, node), lambda found: not found.is_alive)
        assert found.death
        assert not found.is_expected_death

    async def test_a_probe_says_what_a_node_has(self, stage: Stage, tmp_path: Path) -> None:
        node = await stage.add_node({"CPU": 1})
        here, absent = str(tmp_path), str(tmp_path / "absent")
        (found,) = await stage.probe([node], {}, [here, absent], [], GIVE_UP_S)
        assert found.node == node
        assert found.failure == found.problem == found.store_failure == ""
        assert (found.penstock, found.has_torch, list(found.missing)) == (__version__, True, [absent])
        assert abs(found.skew_s) <= 1.0 + found.skew_error_s  # it is the same clock
        (found,) = await stage.probe(["0" * 56], {}, [], [], GIVE_UP_S)
        assert found.failure


async def _node(stage: Stage, node: str) -> NodeView:
    (found,) = [one for one in await stage.nodes() if one.id == node]
    return found


async def _place(stage: Stage, **resources: float) -> tuple[str, dict[str, float]]:
    """A node for this test alone: a name that is a prefix, and the bundle that takes all that the node has."""
    place = f"place-{uuid.uuid4().hex[:8]}"
    await stage.add_node({**resources, place: 1000.0})
    return place, {**resources, place: 0.001}


async def _group(stage: Stage, name: str) -> GroupView:
    (found,) = (await stage.view(name)).groups
    return found


async def _until(stage: Stage, name: str, is_so: Callable[[GroupView], object]) -> GroupView:
    return await until(lambda: _group(stage, name), is_so)


async def until(look: Callable[[], Awaitable[T]], is_so: Callable[[T], object] = bool) -> T:
    """Returns what a call did when `is_so` held for it first. One that Ray does not answer counts for nothing."""
    seen: list[T] = []

    async def keep_looking() -> None:
        while True:
            with contextlib.suppress(PenstockError):
                seen[:] = [await look()]
            await asyncio.sleep(0)

    looking = asyncio.create_task(keep_looking())
    try:
        found = await eventually_async(
            lambda: looking.result() if looking.done() else list(seen),
            lambda found: found and is_so(found[0]),
            within_s=PATIENCE_S,
        )
    finally:
        looking.cancel()
    return found[0]
