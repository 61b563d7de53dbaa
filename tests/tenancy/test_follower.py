import subprocess
import sys
import time
from typing import Any

import pytest

from penstock.core.errors import Unauthenticated
from penstock.tenancy.follower import Follower
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.store import Store, open_store
from penstock.tenancy.tenants import Tenant
from tests.patience import eventually
from tests.tenancy.children import child, line_from

EFFECT_S = 0.2  # from the commit of a revocation to its effect in every gateway


def tenant_of(ring: KeyRing, key: str) -> Tenant | None:
    try:
        return ring.authenticate(key.encode(), time.time()).tenant
    except Unauthenticated:
        return None


def seconds_until_refused(ring: KeyRing, key: str) -> float:
    return eventually(lambda: tenant_of(ring, key) is None)


def has_concurrency(ring: KeyRing, key: str, concurrency: int | None) -> bool:
    tenant = tenant_of(ring, key)
    return tenant is not None and tenant.limits.concurrency == concurrency


def test_another_process_refuses_a_revoked_key_at_once(store: Store, store_url: str) -> None:
    store.add_tenant({"id": "acme"})
    waits = []
    for _ in range(3):
        key = store.create_key("acme")
        with child("follow", store_url, key.secret) as gateway:
            assert line_from(gateway) == "ready"
            time.sleep(0.1)
            store.revoke_key(key.record.id)
            revoked_s = time.time()
            waits.append(float(line_from(gateway)) - revoked_s)
    assert min(waits) < EFFECT_S  # a busy machine may hold up one of them


def test_every_kind_of_change_arrives(store: Store, store_url: str) -> None:
    ring = KeyRing()
    with open_store(store_url) as gateway, Follower(gateway, ring.apply):
        assert not ring.has_had_tenants
        store.add_tenant({"id": "acme"})
        first, second, third = (store.create_key("acme") for _ in range(3))
        assert eventually(lambda: has_concurrency(ring, third.secret, None)) < EFFECT_S
        store.update_tenant("acme", {"limits": {"concurrency": 5}})
        assert eventually(lambda: has_concurrency(ring, third.secret, 5)) < EFFECT_S
        store.revoke_key(first.record.id)
        assert seconds_until_refused(ring, first.secret) < EFFECT_S
        store.rotate_key(second.record.id)
        assert seconds_until_refused(ring, second.secret) < EFFECT_S
        store.remove_tenant("acme")
        assert seconds_until_refused(ring, third.secret) < EFFECT_S


def test_changes_of_other_processes_arrive_though_this_one_has_the_store_open_twice(store_url: str) -> None:
    ring = KeyRing()
    with open_store(store_url) as gateway, open_store(store_url), Follower(gateway, ring.apply):
        for number in range(3):  # each from a process that opens the store, and closes it
            words = [sys.executable, "-m", "penstock.cli.main", "tenants", "add", f"t{number}", "--store", store_url]
            subprocess.run(words, check=True, capture_output=True)
            words = [sys.executable, "-m", "penstock.cli.main", "keys", "create", f"t{number}", "--store", store_url]
            key = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
            assert eventually(lambda: tenant_of(ring, key) is not None) < EFFECT_S  # noqa: B023
            assert ring.authenticate(key.encode(), time.time()).tenant.id == f"t{number}"


@pytest.mark.slow
def test_a_follower_goes_on_after_its_connections_were_cut(postgres: Any, postgres_url: str) -> None:
    ring = KeyRing()
    with open_store(postgres_url) as store, open_store(postgres_url) as gateway, Follower(gateway, ring.apply):
        store.add_tenant({"id": "acme"})
        key = store.create_key("acme")
        eventually(lambda: tenant_of(ring, key.secret) is not None)
        postgres.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock';")
        assert ring.authenticate(key.secret.encode(), time.time()).tenant.id == "acme"  # what was known stays in force
        store.revoke_key(key.record.id)
        assert seconds_until_refused(ring, key.secret) < 3


@pytest.mark.slow
def test_the_worst_of_many_revocations_is_still_at_once(store: Store, store_url: str) -> None:
    store.add_tenant({"id": "acme"})
    ring = KeyRing()
    waits = []
    with open_store(store_url) as gateway, Follower(gateway, ring.apply):
        for number in range(40):
            key = store.create_key("acme")
            eventually(lambda: tenant_of(ring, key.secret) is not None)  # noqa: B023
            time.sleep(number * 0.0018)  # all phases of a poll
            store.revoke_key(key.record.id)
            waits.append(seconds_until_refused(ring, key.secret))
    print(f"revocation to effect: median {sorted(waits)[20] * 1e3:.1f} ms, worst {max(waits) * 1e3:.1f} ms")
    assert max(waits) < EFFECT_S
