"""Admins' keys on both databases, and as gateways follow them."""

from __future__ import annotations

import re
import time

import pytest

from penstock.core.errors import Conflict, InvalidValue, KeyNotFound, Unauthenticated
from penstock.tenancy import migrations
from penstock.tenancy.admins import AdminRing
from penstock.tenancy.follower import Follower
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.migrations import MIGRATIONS
from penstock.tenancy.store import Store, open_store
from tests.waiting import eventually


def ring_of(store: Store) -> AdminRing:
    ring = AdminRing()
    ring.apply(store.changes().admins or ())
    return ring


def works(ring: AdminRing, key: str) -> bool:
    try:
        ring.authenticate(key.encode())
    except Unauthenticated:
        return False
    return True


def test_an_admins_key_is_found_and_its_secret_is_nowhere_in_the_store(store: Store) -> None:
    key = store.admins.add("root")
    assert re.fullmatch(r"psa_[0-9A-Za-z]{10}_[0-9A-Za-z]{32}", key.secret)
    assert ring_of(store).authenticate(key.secret.encode()) == key.record == store.admins.all()[0]
    secret = key.secret.rpartition("_")[2]
    assert secret not in repr(store.admins.all()) + repr(store.changes()) + repr(key)


def test_an_admins_key_is_no_tenants_and_a_tenants_no_admins(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    tenant_key, admin_key = store.create_key("acme").secret, store.admins.add("acme").secret
    tenants = KeyRing()
    tenants.apply(store.changes().tenants)
    with pytest.raises(Unauthenticated):
        tenants.authenticate(admin_key.encode(), time.time())
    assert not works(ring_of(store), tenant_key)


def test_a_revoked_admin_ends_stays_listed_and_leaves_its_name(store: Store) -> None:
    first, other = store.admins.add("root"), store.admins.add("other")
    with pytest.raises(Conflict, match="'root' already"):
        store.admins.add("root")
    revoked = store.admins.revoke("root")
    assert store.admins.revoke("root") == revoked  # twice is once
    second = store.admins.add("root")
    assert store.admins.revoke(second.record.prefix).id == second.record.id
    ring = ring_of(store)
    assert [works(ring, key.secret) for key in (first, other, second)] == [False, True, False]
    assert [admin.name for admin in store.admins.all()] == ["root", "other", "root"]


def test_who_is_not_there_cannot_be_revoked(store: Store) -> None:
    for nobody in ("nobody", "psa_0123456789", "psa_"):
        with pytest.raises(KeyNotFound):
            store.admins.revoke(nobody)
    with pytest.raises(InvalidValue):
        store.admins.add("Not A Name")
    assert store.changes().revision == 0


def test_revoking_the_last_admin_does_not_open_the_door(store: Store) -> None:
    store.admins.add("root")
    store.admins.revoke("root")
    assert ring_of(store).has_had_admins  # in a gateway that starts later, too


def test_changes_tell_of_admins_only_when_one_changed(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    assert store.changes().admins is None
    key = store.admins.add("root")
    seen = store.changes()
    assert seen.admins == (key.record,)
    store.create_key("acme")
    assert store.changes(seen.revision).admins is None


def test_a_follower_hears_of_admins(store: Store, store_url: str) -> None:
    ring = AdminRing()
    with open_store(store_url) as gateway, Follower(gateway, lambda _: None, ring.apply):
        for _ in range(2):
            key = store.admins.add("root")
            eventually(lambda: works(ring, key.secret))  # noqa: B023
            store.admins.revoke("root")
            eventually(lambda: works(ring, key.secret), lambda does: not does)  # noqa: B023


def test_a_store_without_admins_is_brought_up_to_date(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as old_release:
        old_release.setattr(migrations, "MIGRATIONS", MIGRATIONS[:2])
        with open_store(store_url) as store:
            store.add_tenant({"id": "acme"})
    with open_store(store_url) as store:
        key = store.admins.add("root")
        assert works(ring_of(store), key.secret)
        assert store.tenant("acme").id == "acme"
