"""Replicas in the store: one contract, on real SQLite and on real PostgreSQL."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidValue, ReplicaNotFound
from penstock.tenancy.follower import Follower
from penstock.tenancy.replicas import ReplicaRow
from penstock.tenancy.store import Store
from tests.waiting import eventually

URL = "http://10.0.0.5:9001"


def test_a_replica_is_added_drained_and_removed(store: Store) -> None:
    store.replicas.add("chat", URL + "/", {"dialect": "vllm"}, by="root")
    (row,) = store.replicas.all()
    assert (row.model, row.url, row.options, row.is_draining, row.by) == (
        "chat",
        URL,
        {"dialect": "vllm"},
        False,
        "root",
    )
    assert [one.is_draining for one in store.replicas.drain(URL)] == [True]
    assert [one.is_draining for one in store.replicas.drain(URL, is_draining=False)] == [False]
    assert [one.url for one in store.replicas.remove(URL)] == [URL]
    assert store.replicas.all() == []


def test_a_replica_may_be_added_drained_and_the_same_again_ends_it(store: Store) -> None:
    assert store.replicas.add("chat", URL, is_draining=True).is_draining
    store.replicas.add("chat", URL)
    assert [row.is_draining for row in store.replicas.all()] == [False]


def test_a_url_may_be_in_several_pools(store: Store) -> None:
    for model in ("a", "b"):
        store.replicas.add(model, URL)
    store.replicas.drain(URL, "b")
    assert {row.model: row.is_draining for row in store.replicas.all()} == {"a": False, "b": True}
    store.replicas.remove(URL, "a")
    assert [row.model for row in store.replicas.all()] == ["b"]


@pytest.mark.parametrize(
    "url", ["", "10.0.0.5:9001", "ftp://host", "http://host:x", "http://host/v1", "http://me@host"]
)
def test_an_address_that_is_none_changes_nothing(store: Store, url: str) -> None:
    before = store.changes().revision
    with pytest.raises(InvalidValue):
        store.replicas.add("chat", url)
    assert (store.replicas.all(), store.changes().revision) == ([], before)


def test_a_replica_that_is_not_in_the_store_is_told(store: Store) -> None:
    with pytest.raises(ReplicaNotFound, match="a gateway's file"):
        store.replicas.remove(URL)
    store.replicas.add("chat", URL)
    with pytest.raises(ReplicaNotFound):
        store.replicas.drain(URL, "other")


def test_followers_hear_of_every_change_and_of_removals(store: Store) -> None:
    heard: list[list[ReplicaRow]] = []
    with Follower(store, lambda _: None, apply_replicas=lambda rows: heard.append(list(rows))):
        store.replicas.add("chat", URL)
        eventually(lambda: heard and [row.url for row in heard[-1]] == [URL])
        store.replicas.drain(URL)
        eventually(lambda: heard[-1][0].is_draining)
        store.replicas.remove(URL)
        eventually(lambda: heard[-1] == [])
        num_heard = len(heard)
        store.add_tenant({"id": "acme"})
        store.replicas.add("chat", URL)
        eventually(lambda: len(heard) == num_heard + 1)  # a tenant is no news of replicas


def test_a_controller_keeps_a_replica_in_a_state_and_an_operator_ends_it(store: Store) -> None:
    assert store.replicas.add("chat", URL, is_draining=True, state="standby").state == "standby"
    assert [row.state for row in store.replicas.all()] == ["standby"]
    (row,) = store.replicas.drain(URL, is_draining=False)
    assert (row.is_draining, row.state) == (False, "")
    for is_draining, state in ((True, "asleep"), (False, "standby")):
        with pytest.raises(InvalidValue):
            store.replicas.add("chat", URL, is_draining=is_draining, state=state)
