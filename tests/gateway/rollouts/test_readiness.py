"""Ready replicas, as the runner of rollouts is told of them: nobody's knowledge is not nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.gateway.rollouts.readiness import CONNECTING_S, Readiness
from penstock.gateway.tokens.pools import Pools
from penstock.router.routes import Route, RouteTable, Version


class World:
    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.now = 100.0
        versions = (
            Version("v1", 1.0, pool="chat@v1"),
            Version("v2", 0.0, pool="chat@v2"),
            Version("v3", 0.0, pipeline="steps"),
        )
        self.table = RouteTable([Route("chat", versions=versions), Route("steps", is_pipeline=True)])
        self.readiness = Readiness(lambda: self.table, pools, lambda: self.now)

    def num_ready(self, version: str, model: str = "chat") -> int | None:
        return self.readiness.num_ready(model, version)


@pytest.fixture
def world() -> Iterator[World]:
    with ThreadPoolExecutor(1) as threads:
        yield World(Pools(threads))


def test_a_gateway_that_has_just_begun_does_not_know(world: World) -> None:
    assert world.num_ready("v2") is None
    world.now += CONNECTING_S - 1.0
    assert world.num_ready("v2") is None
    world.now += 1.0
    assert world.num_ready("v2") == 0
    assert len(world.pools) == 0  # none is made by asking


def test_what_was_ready_once_is_known_to_be_lost(world: World) -> None:
    world.pools["chat@v2"].num_ready = 2
    assert world.num_ready("v2") == 2
    world.pools["chat@v2"].num_ready = 0
    assert world.num_ready("v2") == 0


def test_a_version_that_the_gateway_does_not_have_is_never_known(world: World) -> None:
    for _ in range(3):
        assert world.num_ready("v9") is None
        assert world.num_ready("v1", "other") is None
        world.now += CONNECTING_S
    assert (world.readiness.has("chat", "v1"), world.readiness.has("chat", "v9")) == (True, False)
    assert not world.readiness.has("other", "v1")


def test_a_pipeline_is_ready_where_it_is(world: World) -> None:
    assert world.num_ready("v3") == 1
