"""Models and versions that no file names: found by their pools, with shares that all gateways learn from the store."""

from __future__ import annotations

from typing import Any

from penstock.gateway.settings.gateway import GatewaySettings, routes_of
from penstock.gateway.settings.route_board import RouteBoard
from penstock.router.routes import PoolShare, Target
from penstock.tenancy.routes import Declared, RouteRevision

URL = "http://a"


def board(**models: dict[str, Any]) -> tuple[RouteBoard, list[list[Declared]]]:
    """And what it wants the store to be told."""
    found = RouteBoard(routes_of(GatewaySettings(models=models).pools()))
    told: list[list[Declared]] = []
    found.found = told.append
    return found, told


def weights(board: RouteBoard, model: str = "m") -> dict[str, float]:
    return {version.name: version.weight for version in board.table.find(model).versions}


def test_a_model_without_versions_is_a_route_as_it_always_was() -> None:
    found, told = board(m={"replicas": [URL]})
    found.discover(["m", "other"])
    assert (found.table.find("m").versions, found.table.find("other").pools) == ((), (PoolShare("other"),))
    found.discover(["m"])
    assert "other" not in found.table
    assert told == []


def test_pools_of_versions_that_no_file_names_are_one_route_whose_first_version_has_all() -> None:
    found, told = board()
    found.discover(["m@v1"])
    assert {found.table.find("m").target(i / 10) for i in range(10)} == {Target("m@v1", "m@v1")}
    found.adopt([Declared("m", {"v1": 100.0}, {"v1": 0.0})])
    found.discover(["m@v0", "m@v1"])  # before the first in the order of names, but not before it in the store
    assert weights(found) == {"v0": 0.0, "v1": 100.0}
    assert told[-1] == [Declared("m", {"v0": 0.0, "v1": 100.0}, {"v0": 0.0, "v1": 0.0})]
    found.apply([RouteRevision("m", 1, {"v0": 25.0, "v1": 75.0})])
    assert weights(found) == {"v0": 25.0, "v1": 75.0}
    assert found.table.find("m@v0").target(0.5).pool == "m@v0"


def test_a_version_beside_a_model_that_had_none_gets_nothing_until_somebody_says_so() -> None:
    found, told = board(m={"replicas": [URL], "aliases": ["short"], "adapters": {"poet": None}})
    found.discover(["m", "m@v2"])
    assert weights(found) == {"base": 100.0, "v2": 0.0}
    assert told == [[Declared("m", {"base": 100.0, "v2": 0.0}, {"base": 0.0, "v2": 0.0})]]
    assert {found.table.find("short").target(i / 10) for i in range(10)} == {Target("m", "m@base")}
    assert found.table.find("poet").target(0.5) == Target("m", "m@base", "poet")
    found.apply([RouteRevision("m", 1, {"base": 0.0, "v2": 100.0})])
    assert {found.table.find("m").target(i / 10) for i in range(10)} == {Target("m@v2", "m@v2")}
    found.discover(["m"])
    assert found.table.find("m").target(0.5) == Target("m")


def test_a_version_beside_those_of_the_file_is_added_to_them() -> None:
    found, told = board(m={"versions": {"v1": {"replicas": [URL], "weight": 7}}})
    found.discover(["m@v1", "m@v2"])
    assert weights(found) == {"v1": 7.0, "v2": 0.0}
    assert told == [[Declared("m", {"v1": 7.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})]]
    found.adopt([Declared("m", {"v1": 50.0, "v2": 50.0}, {})])  # another gateway's file; here this one's counts
    assert weights(found) == {"v1": 7.0, "v2": 50.0}


def test_what_the_store_said_of_versions_that_are_gone_leaves_the_others_their_traffic() -> None:
    found, _ = board()
    found.adopt([Declared("m", {"v1": 100.0, "v2": 0.0}, {})])
    found.apply([RouteRevision("m", 1, {"v1": 100.0, "v2": 0.0})])
    found.discover(["m@v2"])
    assert weights(found) == {"v2": 100.0}


def test_names_that_mean_something_else_are_left_alone() -> None:
    found, told = board(
        a={"replicas": [URL], "aliases": ["m", "x@v1"], "adapters": {"poet": None}},
        auto={"rules": [{"name": "r", "tools": True, "to": "a"}], "default": "a"},
    )
    before = found.table
    found.discover(["a", "m@v1", "poet@v1", "auto@v1", "x@v1", "y@base", "z@v 1", "z@"])
    assert found.table is before
    assert told == []


def test_a_file_that_was_read_again_with_other_versions_is_told_to_the_store() -> None:
    models = {"m": {"versions": {"v1": {"replicas": [URL], "weight": 7}}}}
    found, _ = board(**models)
    told: list[list[Declared]] = []
    found.reread = told.append
    found.configure(routes_of(GatewaySettings(models=models).pools()))
    assert told == []
    models["m"]["versions"]["v2"] = {"replicas": ["http://b"]}
    found.configure(routes_of(GatewaySettings(models=models).pools()))
    assert told == [[Declared("m", {"v1": 7.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})]]
