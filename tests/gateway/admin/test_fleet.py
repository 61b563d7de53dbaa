"""The fleet in the admin API, over HTTP, in front of a real SQLite store."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from penstock.tenancy import fleet as rows
from penstock.tenancy.fleet import FleetReplica, FleetSample, PoolStatus
from tests.gateway.admin.test_api import Administered, api

__all__ = ["api"]


@pytest.fixture
def fleet(api: Administered) -> Iterator[Administered]:
    book, now = api.store.fleet, time.time()
    lease = book.take_lease("f", "a", None)
    assert lease is not None
    with book.fenced("f", lease) as execute:
        rows.write_pool(execute, PoolStatus("p", now, wanted=2, max=4, states={"active": 1, "starting": 1}))
        rows.write_replica(execute, FleetReplica("p-1", "p", "active", now - 5, zone="a", price_per_hour=2.0))
        for pool, ago in (("p", 50.0), ("q", 40.0), ("p", 30.0), ("p", 7200.0)):
            rows.write_decision(execute, now - ago, pool, PoolStatus(pool, now - ago, wanted=int(ago)))
            rows.write_sample(execute, FleetSample(now - ago, pool, {"active": 1}, cost=0.5))
    yield api
    with book.fenced("f", lease) as execute:
        for table in ("fleet_pools", "fleet_replicas", "fleet_decisions", "fleet_history", "fleet_lease"):
            execute(f"DELETE FROM {table}", ())


def test_status_has_every_field_of_pools_and_replicas(fleet: Administered) -> None:
    status, found = fleet.ask("GET", "/admin/v1/fleet")
    assert status == 200
    (pool,), (replica,) = found["pools"], found["replicas"]
    assert (pool["states"], pool["bound"], pool["reversals"]) == ({"active": 1, "starting": 1}, "", 0)
    assert (replica["zone"], replica["deadline"], replica["capacity_type"]) == ("a", None, "on_demand")
    assert abs(found["at"] - time.time()) < 3600


def test_without_a_fleet_it_is_empty(api: Administered) -> None:
    status, found = api.ask("GET", "/admin/v1/fleet")
    assert (status, found["pools"], found["replicas"]) == (200, [], [])
    assert api.ask("GET", "/admin/v1/fleet/decisions") == (200, {"decisions": []})
    assert api.ask("GET", "/admin/v1/fleet/history") == (200, {"samples": []})


def test_decisions_are_those_of_a_pool_and_a_time_the_newest_first(fleet: Administered) -> None:
    def wanted(query: str) -> list[int]:
        return [one["wanted"] for one in fleet.ask("GET", f"/admin/v1/fleet/decisions{query}")[1]["decisions"]]

    assert wanted("") == [30, 40, 50, 7200]
    assert wanted("?pool=p&since=1h") == [30, 50]
    assert wanted("?pool=p&limit=1") == [30]


def test_history_is_of_the_last_hour_unless_it_is_said_otherwise(fleet: Administered) -> None:
    assert len(fleet.ask("GET", "/admin/v1/fleet/history")[1]["samples"]) == 3
    assert len(fleet.ask("GET", "/admin/v1/fleet/history?pool=p&since=3h")[1]["samples"]) == 3


def test_cost_is_shared_out(fleet: Administered) -> None:
    status, found = fleet.ask("GET", "/admin/v1/fleet/cost?since=24h")
    assert (status, [(one["pool"], one["cost"]) for one in found["pools"]]) == (200, [("p", 1.5), ("q", 0.5)])
    assert [(one["pool"], one["tenant"], one["cost"]) for one in found["tenants"]] == [("p", "", 1.5), ("q", "", 0.5)]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("fleet/decisions?limit=0", 422),
        ("fleet/decisions?limit=many", 422),
        ("fleet/history?since=yesterday", 422),
        ("fleet/decisions?pools=p", 422),
        ("fleet/plans", 404),
    ],
)
def test_what_is_wrong_is_refused(api: Administered, path: str, status: int) -> None:
    assert api.ask("GET", f"/admin/v1/{path}")[0] == status


def test_fleet_is_for_admins_and_is_not_changed_here(api: Administered) -> None:
    assert api.ask("GET", "/admin/v1/fleet", key=None)[0] == 401
    assert api.ask("POST", "/admin/v1/fleet", {})[0] == 405
