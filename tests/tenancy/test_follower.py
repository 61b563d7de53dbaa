import subprocess
import sys
import time
from typing import Any

import pytest

from penstock.core.errors import Unauthenticated
from penstock.tenancy.follower import Follower
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.store import Store, open_store
from tests.tenancy.children import child, line_from

EFFECT_S = 0.2  # from the commit of a revocation to its effect in every gateway


def seconds_until_refused(ring: KeyRing, key: str, *, timeout_s: float = 5.0) -> float:
    start_s = time.monotonic()
    while time.monotonic() < start_s + timeout_s:
        try:
            ring.authenticate(key.encode(), time.time())
        except Unauthenticated:
            return time.monotonic() - start_s
        time.sleep(0.001)
    raise AssertionError("the key still works")


def test_another_process_refuses_a_revoked_key_at_once(store: Store, store_url: str) -> None:
    store.add_tenant({"id": "acme"})
    for _ in range(2):
        key = store.create_key("acme")
        with child("follow", store_url, key.secret) as gateway:
            assert line_from(gateway) == "ready"
            time.sleep(0.1)
            store.revoke_key(key.record.id)
            revoked_s = time.time()
            assert float(line_from(gateway)) - revoked_s < EFFECT_S


def test_every_kind_of_change_arrives(store: Store, store_url: str) -> None:
    ring = KeyRing()
    with open_store(store_url) as gateway, Follower(gateway, ring.apply):
        assert not ring.has_had_tenants
        store.add_tenant({"id": "acme"})
        first, second, third = (store.create_key("acme") for _ in range(3))
        time.sleep(EFFECT_S)
        assert ring.authenticate(third.secret.encode(), time.time()).tenant.limits.concurrency is None
        store.update_tenant("acme", {"limits": {"concurrency": 5}})
        time.sleep(EFFECT_S)
        assert ring.authenticate(third.secret.encode(), time.time()).tenant.limits.concurrency == 5
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
            time.sleep(EFFECT_S)
            assert ring.authenticate(key.encode(), time.time()).tenant.id == f"t{number}"


@pytest.mark.slow
def test_a_follower_goes_on_after_its_connections_were_cut(postgres: Any, postgres_url: str) -> None:
    ring = KeyRing()
    with open_store(postgres_url) as store, open_store(postgres_url) as gateway, Follower(gateway, ring.apply):
        store.add_tenant({"id": "acme"})
        key = store.create_key("acme")
        time.sleep(0.1)
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
            time.sleep(0.06 + number * 0.0018)  # all phases of a poll
            store.revoke_key(key.record.id)
            waits.append(seconds_until_refused(ring, key.secret))
    print(f"revocation to effect: median {sorted(waits)[20] * 1e3:.1f} ms, worst {max(waits) * 1e3:.1f} ms")
    assert max(waits) < EFFECT_S
