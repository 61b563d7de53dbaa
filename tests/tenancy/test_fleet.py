"""The fleet's part of the store: the lease that fences a controller's writes, and what is kept."""

from __future__ import annotations

import time

import pytest

from penstock.core.errors import LeaseLost
from penstock.tenancy import fleet as rows
from penstock.tenancy.fleet import FleetBook, FleetReplica, FleetSample, PoolDemand, PoolStatus
from penstock.tenancy.replicas import ReplicaRow
from penstock.tenancy.store import Store


def test_lease_is_taken_by_one_of_two(store: Store) -> None:
    book = store.fleet
    first = book.take_lease("f", "a", None)
    assert first is not None
    assert first.epoch == 1
    assert book.take_lease("f", "b", None) is None
    seen = book.lease("f")
    second = book.take_lease("f", "b", seen)
    assert second is not None
    assert second.epoch == 2


def test_renewed_lease_is_not_taken_by_one_who_saw_it_before(store: Store) -> None:
    book = store.fleet
    lease = book.take_lease("f", "a", None)
    assert lease is not None
    seen = book.lease("f")
    with book.fenced("f", lease):
        pass
    assert book.take_lease("f", "b", seen) is None


def test_replaced_holder_writes_nothing(store: Store) -> None:
    book = store.fleet
    old = book.take_lease("f", "a", None)
    new = book.take_lease("f", "b", book.lease("f"))
    assert old is not None
    assert new is not None
    with pytest.raises(LeaseLost), book.fenced("f", old) as execute:
        rows.write_replica(execute, FleetReplica("r", "p", "starting", 0.0))
    with book.fenced("f", new) as execute:
        rows.write_replica(execute, FleetReplica("s", "p", "starting", 0.0))
    assert [row.id for row in book.replicas()] == ["s"]


def test_released_lease_is_free(store: Store) -> None:
    book = store.fleet
    lease = book.take_lease("f", "a", None)
    assert lease is not None
    book.release_lease("f", lease)
    seen = book.lease("f")
    assert seen is not None
    assert not seen.holder
    with pytest.raises(LeaseLost), book.fenced("f", lease):
        pass


def test_members_are_told_to_gateways_in_the_same_transaction(store: Store) -> None:
    book = store.fleet
    lease = book.take_lease("f", "a", None)
    assert lease is not None
    before = store.changes().revision
    with book.fenced("f", lease) as execute:
        book.write_members(execute, [ReplicaRow("p", "http://127.0.0.1:1"), ReplicaRow("p", "http://127.0.0.1:2")], [])
    changes = store.changes(before)
    assert changes.replicas is not None
    assert len(changes.replicas) == 2
    with book.fenced("f", lease) as execute:
        book.write_members(execute, [], [ReplicaRow("p", "http://127.0.0.1:1")])
    assert [row.url for row in store.replicas.all()] == ["http://127.0.0.1:2"]


def test_gateways_write_demand_and_read_what_controllers_say(store: Store) -> None:
    book = store.fleet
    lease = book.take_lease("f", "a", None)
    assert lease is not None
    now = time.time()
    assert book.write_demand([PoolDemand("g", "p", now, arrivals=3)]) == {}
    with book.fenced("f", lease) as execute:
        rows.write_pool(execute, PoolStatus("p", now, wanted=2, eta_s=4.5))
    found = book.write_demand([PoolDemand("g", "p", now, arrivals=5), PoolDemand("old", "p", now - 3600)])
    assert found["p"].eta_s == 4.5
    assert [(row.gateway, row.arrivals) for row in book.demand()] == [("g", 5)]


def test_decisions_and_history_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_DECISIONS", 3)
    monkeypatch.setattr(rows, "MAX_HISTORY", 2)
    book = store.fleet
    lease = book.take_lease("f", "a", None)
    assert lease is not None
    for at in range(6):
        with book.fenced("f", lease) as execute:
            rows.write_decision(execute, float(at), "p", PoolStatus("p", float(at)))
            rows.write_sample(execute, FleetSample(float(at), "p", arrivals_per_s=at))
    assert [one.at for one in book.decisions("p")] == [5.0, 4.0, 3.0]
    assert [one.arrivals_per_s for one in book.history("p")] == [4.0, 5.0]
    assert book.decisions("other") == []


def test_memory_is_kept_by_pool_and_name(store: Store) -> None:
    book = store.fleet
    lease = book.take_lease("f", "a", None)
    assert lease is not None
    with book.fenced("f", lease) as execute:
        rows.write_memory(execute, "p", "forecast", "{}")
        rows.write_memory(execute, "p", "forecast", '{"a":1}')
    assert book.memory("p") == {"forecast": '{"a":1}'}
    assert book.memory("q") == {}


def test_pool_of_a_killed_process_is_not_shown_and_then_removed_with_all_it_told_gateways(store: Store) -> None:
    now = [1000.0, 50.0]  # seconds since 1970, and those in which this machine was not suspended
    book = FleetBook(store.fleet._database, lambda: now[0], lambda: now[1])
    for fleet, is_ephemeral in (("serve", True), ("penstock", False)):
        lease = book.take_lease(fleet, "a", None)
        assert lease is not None
        with book.fenced(fleet, lease) as execute:
            rows.write_pool(execute, PoolStatus(f"of {fleet}", 1000.0, fleet=fleet, is_ephemeral=is_ephemeral))
            rows.write_replica(execute, FleetReplica(f"r-{fleet}", f"of {fleet}", "active", 0.0, fleet=fleet))
            member = ReplicaRow(f"of {fleet}", f"http://{fleet}:1", by=rows.member_author(fleet))
            book.write_members(execute, [member], ())
    assert set(book.write_demand([])) == {"of serve", "of penstock"}
    now[0] += 31.0
    assert set(book.write_demand([])) == {"of penstock"}
    assert [one.pool for one in book.pools()] == ["of penstock"]
    now[0] += 3600.0  # the machine was suspended: perhaps the process goes on in a moment
    book.write_demand([])
    assert {row.fleet for row in book.replicas()} == {"serve", "penstock"}
    now[0], now[1] = now[0] + 121.0, now[1] + 121.0
    book.write_demand([])
    assert {row.fleet for row in book.replicas()} == {"penstock"}
    assert [row.url for row in store.replicas.all()] == ["http://penstock:1"]
    held = book.lease("serve")
    assert held is not None
    assert not held.holder
