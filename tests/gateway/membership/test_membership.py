"""Sources that name replicas, and the set that follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from penstock.core.errors import ConfigError
from penstock.gateway.membership.factory import ReplicaFactory
from penstock.gateway.membership.member import Member
from penstock.gateway.membership.membership import Membership
from penstock.gateway.membership.store import StoreSource
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import ReplicaSet, Subscriber
from penstock.gateway.settings.gateway import ModelSettings
from penstock.tenancy.replicas import ReplicaRow

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Log(Subscriber):
    def __init__(self) -> None:
        self.said: list[str] = []

    def replica_added(self, replica: Replica) -> None:
        self.said.append(f"+{replica.id}")

    def replica_changed(self, replica: Replica) -> None:
        self.said.append(f"~{replica.id}")

    def replica_removed(self, replica: Replica) -> None:
        self.said.append(f"-{replica.id}")

    def told(self) -> list[str]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def replicas() -> ReplicaSet:
    return ReplicaSet()


@pytest.fixture
def log(replicas: ReplicaSet) -> Log:
    found = Log()
    replicas.subscribe(found)
    return found


@pytest.fixture
def membership(replicas: ReplicaSet) -> Membership:
    return Membership(replicas, ReplicaFactory(), {B: {"poet"}})


def pools(*urls: str, **settings: object) -> dict[str, ModelSettings]:
    return {"m": ModelSettings(replicas=list(urls), served_as="m", **settings)}  # type: ignore[arg-type]


async def test_a_configuration_that_changes_adds_and_removes_the_difference(membership: Membership, log: Log) -> None:
    membership.configure(pools(A, B))
    assert log.told() == [f"+{A}", f"+{B}"]
    membership.configure(pools(B, C, hold_s=5.0))
    assert log.told() == [f"-{A}", f"+{C}"]
    membership.configure(pools(B, C))
    assert log.told() == []
    membership.configure({})
    assert sorted(log.told()) == [f"-{B}", f"-{C}"]


async def test_a_replica_that_is_reached_in_another_way_is_made_anew(
    membership: Membership, replicas: ReplicaSet, log: Log
) -> None:
    membership.configure(pools(A))
    old = replicas[A]
    membership.configure(pools(A, dialect="vllm"))
    assert log.told() == [f"+{A}", f"-{A}", f"+{A}"]
    assert (replicas[A] is old, replicas[A].dialect) == (False, "vllm")


async def test_adapters_change_in_place(membership: Membership, replicas: ReplicaSet, log: Log) -> None:
    membership.configure(pools(A, B, adapters={"poet": "/lora/poet"}))
    assert (replicas[A].unwanted, replicas[B].unwanted) == (set(), set())
    log.told()
    membership.configure(pools(A, B))
    assert log.told() == [f"~{A}", f"~{B}"]
    assert replicas[A].unwanted == {"poet"}


async def test_what_an_earlier_gateway_brought_is_unwanted(membership: Membership, replicas: ReplicaSet) -> None:
    membership.configure(pools(A, B))
    assert (replicas[A].unwanted, replicas[B].unwanted) == (set(), {"poet"})


async def test_a_configuration_that_is_wrong_changes_nothing(membership: Membership, log: Log) -> None:
    membership.configure(pools(A))
    log.told()
    for wrong in (pools(B, dialect="klingon"), pools(A, "nowhere"), pools(B, key_env="NOT_SET")):
        with pytest.raises(ConfigError):
            membership.configure(wrong)
        assert log.told() == []


async def test_a_url_in_two_pools_has_two_ids_and_one_that_is_there_keeps_its_own(
    membership: Membership, replicas: ReplicaSet
) -> None:
    store = StoreSource()
    store.changed = membership.refresh
    membership.configure(pools(A))
    membership.add_source(store)
    store.apply([ReplicaRow("other", A), ReplicaRow("third", B), ReplicaRow("fourth", B)])
    assert {replica.id: replica.model for replica in replicas.values()} == {
        A: "m",
        f"{A}#other": "other",
        f"{B}#third": "third",
        f"{B}#fourth": "fourth",
    }


async def test_the_store_adds_drains_and_removes(membership: Membership, replicas: ReplicaSet, log: Log) -> None:
    store, changes = StoreSource(), []
    store.changed = membership.refresh
    membership.changed = lambda: changes.append(sorted(membership.pools))
    membership.configure(pools(A))
    membership.add_source(store)
    store.apply([ReplicaRow("m", B), ReplicaRow("new", C, options={"dialect": "vllm", "served_as": "org/new"})])
    assert log.told() == [f"+{A}", f"+{B}", f"+{C}"]
    assert (replicas[C].model, replicas[C].served_as, replicas[C].dialect) == ("new", "org/new", "vllm")
    assert changes == [["m"], ["m", "new"]]
    store.apply([ReplicaRow("m", A, is_draining=True), ReplicaRow("m", B)])
    assert sorted(log.told()) == [f"-{C}", f"~{A}"]
    assert [replica.is_draining for replica in replicas.values()] == [True, False]
    assert changes[-1] == ["m"]
    store.apply([])
    assert log.told() == [f"-{B}", f"~{A}"]
    assert not replicas[A].is_draining


async def test_a_version_that_no_file_names_has_its_models_name_at_its_replicas(
    membership: Membership, replicas: ReplicaSet
) -> None:
    store = StoreSource()
    store.changed = membership.refresh
    membership.add_source(store)
    store.apply([ReplicaRow("new@v2", A)])
    assert (replicas[A].model, replicas[A].served_as) == ("new@v2", "new")


async def test_a_row_that_cannot_be_used_is_told_of_and_leaves_the_others(
    membership: Membership, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    store = StoreSource()
    store.changed = membership.refresh
    membership.add_source(store)
    store.apply(
        [
            ReplicaRow("m", A, options={"dialect": "klingon"}),
            ReplicaRow("m", B, options={"price": 1}),
            ReplicaRow("m", C),
        ]
    )
    assert log.told() == [f"+{C}"]
    for complaint in ("klingon", "'price' is no option"):
        assert complaint in caplog.text


async def test_a_replica_is_of_the_first_source_that_names_it(membership: Membership, replicas: ReplicaSet) -> None:
    store = StoreSource()
    store.changed = membership.refresh
    membership.configure(pools(A))
    membership.add_source(store)

    def sources() -> dict[str, tuple[str, bool]]:
        return {replica.id: (replica.source, replica.is_draining) for replica in replicas.values()}

    store.apply([ReplicaRow("m", A, is_draining=True), ReplicaRow("m", B)])
    assert sources() == {A: ("file", True), B: ("store", False)}
    membership.configure(pools(B))
    assert sources() == {A: ("store", True), B: ("file", False)}
    store.apply([])
    assert sources() == {B: ("file", False)}


async def test_any_protocol_of_discovery_is_one_more_source(
    membership: Membership, replicas: ReplicaSet, log: Log
) -> None:
    class Mine:
        name = "mine"

        def members(self, pools: Mapping[str, ModelSettings]) -> Iterator[Member]:
            yield Member("m", C, pools["m"])

    membership.configure(pools(A))
    membership.add_source(Mine())
    assert log.told() == [f"+{A}", f"+{C}"]
    assert replicas[C].source == "mine"
    await asyncio.sleep(0)


async def test_a_replica_that_rested_is_used_at_once_whatever_probes_said(
    membership: Membership, replicas: ReplicaSet, log: Log
) -> None:
    store = StoreSource()
    store.changed = membership.refresh
    membership.add_source(store)
    store.apply([ReplicaRow("m", A, is_draining=True, state="starting")])
    replica = replicas[A]
    assert replica.is_resting
    for _ in range(3):
        replica.health.probed(False)
    assert not replica.health.is_in
    store.apply([ReplicaRow("m", A, is_draining=True, state="standby")])
    assert (replica.fleet_state, replica.health.is_in) == ("standby", False)
    store.apply([ReplicaRow("m", A)])
    assert (replica.is_resting, replica.is_draining, replica.health.is_in) == (False, False, True)
    assert log.told() == [f"+{A}", f"~{A}", f"~{A}"]
