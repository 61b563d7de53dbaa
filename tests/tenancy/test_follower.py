import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import PermissionDenied, StoreCorrupt, TenantNotFound, Unauthenticated
from penstock.tenancy.admins import AdminRing
from penstock.tenancy.follower import Follower
from penstock.tenancy.keys import KeyRing, TenantState
from penstock.tenancy.sqlite import POLL_S, SqliteWatch
from penstock.tenancy.store import Store, open_store
from penstock.tenancy.tenants import Tenant
from tests.tenancy.children import child, line_from
from tests.virtual_time import SteppedClock
from tests.waiting import GIVE_UP_S, eventually

EFFECT_S = 0.2  # from the commit of a revocation to its effect in every gateway


def tenant_of(ring: KeyRing, key: str) -> Tenant | None:
    try:
        return ring.authenticate(key.encode(), time.time()).tenant
    except Unauthenticated:
        return None


def until_known(ring: KeyRing, key: str) -> Tenant:
    tenant = eventually(lambda: tenant_of(ring, key), lambda tenant: tenant is not None)
    assert tenant is not None
    return tenant


def until_refused(ring: KeyRing, key: str) -> None:
    eventually(lambda: tenant_of(ring, key), lambda tenant: tenant is None)


def test_another_process_refuses_a_revoked_key(store: Store, store_url: str) -> None:
    store.add_tenant({"id": "acme"})
    key = store.create_key("acme")
    with child("follow", store_url, key.secret) as gateway:
        assert line_from(gateway) == "works"
        store.revoke_key(key.record.id)
        assert line_from(gateway) == "refused"


def test_a_watch_wakes_for_a_commit_and_only_for_one(store: Store, store_url: str) -> None:
    with open_store(store_url) as gateway, gateway.watch() as watch:
        assert not watch.wait(0.0)
        store.add_tenant({"id": "acme"})
        assert watch.wait(GIVE_UP_S)  # PostgreSQL sends it, and SQLite's first look finds it
        assert not watch.wait(0.0)


def test_sqlite_is_looked_at_so_often_that_a_change_takes_effect_in_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "penstock.db", SteppedClock()
    pauses: list[float] = []
    with open_store(f"sqlite:///{path}") as store:

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                store.add_tenant({"id": "acme"})  # just after a look: the worst time
            clock.advance(seconds)

        watch = SqliteWatch(sqlite3.connect(path), path, clock=clock, sleep=sleep)
        assert watch.wait(10.0)
        assert pauses == [POLL_S] * 3
        assert POLL_S <= EFFECT_S / 2
        pauses.clear()
        assert not watch.wait(1.3 * POLL_S)
        assert pauses == [POLL_S, pytest.approx(0.3 * POLL_S)]
        watch.close()


def test_every_kind_of_change_arrives(store: Store, store_url: str) -> None:
    ring = KeyRing()
    with open_store(store_url) as gateway, Follower(gateway, ring.apply):
        assert not ring.has_had_tenants
        store.add_tenant({"id": "acme"})
        first, second, third = (store.create_key("acme") for _ in range(3))
        assert until_known(ring, third.secret).limits.concurrency is None
        store.update_tenant("acme", {"limits": {"concurrency": 5}})
        eventually(lambda: until_known(ring, third.secret).limits.concurrency, lambda found: found == 5)
        store.revoke_key(first.record.id)
        until_refused(ring, first.secret)
        store.rotate_key(second.record.id)
        until_refused(ring, second.secret)
        store.remove_tenant("acme")
        until_refused(ring, third.secret)


def test_changes_of_other_processes_arrive_though_this_one_has_the_store_open_twice(store_url: str) -> None:
    ring = KeyRing()
    with open_store(store_url) as gateway, open_store(store_url), Follower(gateway, ring.apply):
        for name in ("first", "second"):  # each from a process that opens the store, and closes it
            with child("admit", store_url, name) as other:
                key = line_from(other)
            assert until_known(ring, key).id == name


def spoil(store: Store, tenant_id: str, document: str) -> None:
    """As a newer penstock, or somebody's hand, may leave it."""
    with store._database.writing() as execute:
        store._changed(execute, tenant_id)
        execute("UPDATE tenants SET document = ? WHERE id = ?", (document, tenant_id))


UNREADABLE = ['{"id":"acme","priority":"whenever"}', "{", '{"id":"acme","limits":{"max_input":1e400}}']


@pytest.mark.parametrize("document", UNREADABLE)
def test_a_tenant_that_cannot_be_read_is_closed_and_the_others_follow_on(
    store: Store, store_url: str, document: str
) -> None:
    store.add_tenant({"id": "acme"})
    store.add_tenant({"id": "other"})
    key, others, revoked = store.create_key("acme"), store.create_key("other"), store.create_key("other")
    ring = KeyRing()
    with open_store(store_url) as gateway, Follower(gateway, ring.apply):
        until_known(ring, key.secret)
        spoil(store, "acme", document)
        eventually(lambda: is_closed(ring, key.secret))
        store.revoke_key(revoked.record.id)  # what comes later is heard of
        until_refused(ring, revoked.secret)
        assert tenant_of(ring, others.secret) is not None
        store.update_tenant("other", {"is_active": False})
        eventually(lambda: is_closed(ring, others.secret))


def is_closed(ring: KeyRing, key: str) -> bool:
    try:
        return tenant_of(ring, key) is None
    except PermissionDenied:
        return True


def test_a_gateway_that_starts_with_one_tenant_that_it_cannot_read_is_not_open_to_everybody(
    store: Store, store_url: str
) -> None:
    store.add_tenant({"id": "acme"})
    spoil(store, "acme", UNREADABLE[0])
    ring = KeyRing()
    with open_store(store_url) as gateway, Follower(gateway, ring.apply):
        assert ring.has_had_tenants


def test_a_tenant_that_cannot_be_read_is_named_and_can_be_removed(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    key = store.create_key("acme")
    spoil(store, "acme", UNREADABLE[0])
    assert list(store.unreadable_tenants()) == ["acme"]
    for look in (store.tenants, lambda: store.tenant("acme")):
        with pytest.raises(StoreCorrupt, match="tenant 'acme' cannot be read: Invalid enum value 'whenever'"):
            look()
    assert store.revoke_key(key.record.id).revoked_at
    assert [one.id for one in store.keys("acme")] == [key.record.id]
    store.remove_tenant("acme")
    with pytest.raises(TenantNotFound):
        store.tenant("acme")


def test_a_key_an_admin_or_a_route_that_cannot_be_read_is_left_out_alone(store: Store, store_url: str) -> None:
    store.add_tenant({"id": "acme"})
    bad, good = store.create_key("acme"), store.create_key("acme")
    store.admins.add("ann")
    bob = store.admins.add("bob")
    with store._database.writing() as execute:
        store._changed(execute, "acme")
        execute("UPDATE api_keys SET hash = 'none' WHERE id = ?", (bad.record.id,))
        execute("UPDATE admin_keys SET hash = 'none' WHERE name = 'ann'")
        execute("INSERT INTO route_revisions (revision, name, document) VALUES (99, 'r', '{')")
    changes = store.changes()
    assert [key.id for key in changes.tenants[0].keys] == [good.record.id]
    assert changes.admins is not None
    ring = AdminRing()
    ring.apply(changes.admins)
    assert ring.authenticate(bob.secret.encode()).name == "bob"
    assert changes.routes == ()


def test_a_follower_outlives_an_error_that_nobody_expected(store: Store, store_url: str) -> None:
    ring, num_failures = KeyRing(), 0

    def apply(states: Iterable[TenantState]) -> None:
        nonlocal num_failures
        if any(state.tenant_id == "acme" for state in states) and num_failures < 3:
            num_failures += 1
            raise RuntimeError("nobody expected this")
        ring.apply(states)

    with open_store(store_url) as gateway, Follower(gateway, apply, retry_s=0.001):
        store.add_tenant({"id": "acme"})
        until_known(ring, store.create_key("acme").secret)
    assert num_failures == 3


@pytest.mark.slow
def test_a_follower_goes_on_after_its_connections_were_cut(postgres: Any, postgres_url: str) -> None:
    ring = KeyRing()
    with (
        open_store(postgres_url) as store,
        open_store(postgres_url) as gateway,
        Follower(gateway, ring.apply, retry_s=0.01),
    ):
        store.add_tenant({"id": "acme"})
        key = store.create_key("acme")
        until_known(ring, key.secret)
        postgres.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock';")
        assert ring.authenticate(key.secret.encode(), time.time()).tenant.id == "acme"  # what was known stays in force
        store.revoke_key(key.record.id)
        until_refused(ring, key.secret)


@pytest.mark.slow
@pytest.mark.drill
def test_the_worst_of_many_revocations_is_still_at_once(store: Store, store_url: str) -> None:
    store.add_tenant({"id": "acme"})
    ring = KeyRing()
    waits = []
    with open_store(store_url) as gateway, Follower(gateway, ring.apply):
        for number in range(40):
            key = store.create_key("acme")
            until_known(ring, key.secret)
            time.sleep(number * 0.0018)  # all phases of a poll
            store.revoke_key(key.record.id)
            revoked_s = time.monotonic()
            until_refused(ring, key.secret)
            waits.append(time.monotonic() - revoked_s)
    print(f"revocation to effect: median {sorted(waits)[20] * 1e3:.1f} ms, worst {max(waits) * 1e3:.1f} ms")
    assert max(waits) < EFFECT_S
