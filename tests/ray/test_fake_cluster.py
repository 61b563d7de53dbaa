"""The fake Ray cluster keeps the contract of a real one."""

from __future__ import annotations

import pytest

from penstock.fleet.drivers.ray_cluster import EngineOrder
from tests.ray.contract import RayClusterContract
from tests.ray.fake_cluster import FakeRayCluster


class TestFakeRayCluster(RayClusterContract):
    @pytest.fixture
    def stage(self) -> FakeRayCluster:
        return FakeRayCluster()

    @pytest.fixture
    def order(self) -> EngineOrder:
        return EngineOrder("{}", "secret")

    @pytest.fixture
    def wide_order(self, order: EngineOrder) -> EngineOrder:
        return order
