"""One contract, on real SQLite and on real PostgreSQL."""

from __future__ import annotations

import contextlib
import stat
import time
from pathlib import Path

import pytest

from penstock.core.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    KeyNotFound,
    StoreUnavailable,
    TenantNotFound,
    Unauthenticated,
)
from penstock.tenancy import migrations
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.migrations import MIGRATIONS, migrate
from penstock.tenancy.store import Store, open_database, open_store
from penstock.tenancy.tenants import Limits, PriorityClass
from penstock.tenancy.usage import Spent, Usage, UsageSum
from tests.tenancy.children import child, run_at_once

pytestmark = pytest.mark.slow


def ring_of(store: Store) -> KeyRing:
    ring = KeyRing()
    ring.apply(store.changes().tenants)
    return ring


def works(store: Store, key: str, now_s: float | None = None) -> bool:
    try:
        ring_of(store).authenticate(key.encode(), time.time() if now_s is None else now_s)
    except Unauthenticated:
        return False
    return True


def test_a_tenant_comes_back_as_it_was_added(store: Store) -> None:
    added = store.add_tenant(
        {
            "id": "acme",
            "name": "Äcme",
            "limits": {"tokens_per_minute": 2**40},
            "priority": "batch",
            "models": ["a", "b-*"],
        }
    )
    assert store.tenant("acme") == added
    assert (added.limits, added.priority) == (Limits(tokens_per_minute=2**40), PriorityClass.BATCH)
    assert added.created_at == pytest.approx(time.time(), abs=60)


def test_tenants_are_listed_by_id(store: Store) -> None:
    for name in ("b", "c", "a"):
        store.add_tenant({"id": name})
    assert [tenant.id for tenant in store.tenants()] == ["a", "b", "c"]


def test_a_tenant_is_added_once(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    with pytest.raises(Conflict, match="'acme' already"):
        store.add_tenant({"id": "acme"})
    assert store.changes().revision == 1


def test_what_is_not_there_is_named(store: Store) -> None:
    for about_tenant in (store.tenant, store.remove_tenant, store.create_key, store.keys):
        with pytest.raises(TenantNotFound, match="nobody"):
            about_tenant("nobody")
    with pytest.raises(TenantNotFound, match="nobody"):
        store.update_tenant("nobody", {})
    for about_key in (store.revoke_key, store.rotate_key):
        with pytest.raises(KeyNotFound, match="psk_0123456789"):
            about_key("0123456789")
    assert store.changes().revision == 0


def test_a_change_leaves_the_rest(store: Store) -> None:
    store.add_tenant({"id": "acme", "limits": {"concurrency": 3, "max_input": 5}, "priority": "batch"})
    changed = store.update_tenant("acme", {"limits": {"concurrency": None, "max_output": 7}})
    assert changed.limits == Limits(max_input=5, max_output=7)
    assert store.tenant("acme").priority is PriorityClass.BATCH


def test_a_bad_change_changes_nothing(store: Store) -> None:
    before = store.add_tenant({"id": "acme"})
    with pytest.raises(InvalidRequest):
        store.update_tenant("acme", {"limits": {"concurrency": 0}})
    assert store.tenant("acme") == before
    assert store.changes(since=1).tenants == ()


def test_a_key_is_found_and_its_secret_is_nowhere_in_the_store(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    key = store.create_key("acme", name="laptop")
    caller = ring_of(store).authenticate(key.secret.encode(), time.time())
    assert (caller.tenant.id, caller.key_id) == ("acme", key.record.id)
    assert store.keys("acme") == store.keys() == [key.record]
    kept = repr(store.keys()) + repr(store.changes())
    assert key.secret.removeprefix(key.record.prefix + "_") not in kept


def test_a_revoked_key_ends_and_stays_listed(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    first, second = store.create_key("acme"), store.create_key("acme")
    revoked = store.revoke_key(first.record.id)
    assert store.revoke_key(first.record.id) == revoked  # twice is once
    assert [works(store, key.secret) for key in (first, second)] == [False, True]
    assert [key.revoked_at for key in store.keys("acme")] == [revoked.revoked_at, None]


def test_a_key_works_until_it_expires(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    expires_at = time.time() + 60
    key = store.create_key("acme", expires_at=expires_at).secret
    assert works(store, key, expires_at - 0.001)
    assert not works(store, key, expires_at)


def test_a_rotated_key_ends_at_once_or_after_its_grace(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    first = store.create_key("acme", name="laptop")
    second = store.rotate_key(first.record.id)
    assert [works(store, key.secret) for key in (first, second)] == [False, True]
    third = store.rotate_key(second.record.id, grace_s=3600)
    assert third.record.name == "laptop"
    assert works(store, second.secret)
    assert not works(store, second.secret, time.time() + 3601)
    assert works(store, third.secret, time.time() + 3601)


def test_a_grace_never_lengthens_a_key(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    key = store.create_key("acme", expires_at=time.time() + 10)
    store.rotate_key(key.record.id, grace_s=3600)
    assert not works(store, key.secret, time.time() + 11)


def test_a_key_that_has_ended_cannot_be_rotated(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    revoked, expired = store.create_key("acme"), store.create_key("acme", expires_at=time.time() - 1)
    store.revoke_key(revoked.record.id)
    for key in (revoked, expired):
        with pytest.raises(Conflict, match="has ended"):
            store.rotate_key(key.record.id)


def test_a_removed_tenant_takes_its_keys_along_and_its_id_can_be_used_again(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    key = store.create_key("acme").secret
    store.remove_tenant("acme")
    assert not works(store, key)
    store.add_tenant({"id": "acme"})
    assert store.keys() == []
    assert not works(store, key)


def test_changes_tell_what_is_new_and_nothing_else(store: Store) -> None:
    store.add_tenant({"id": "a"})
    store.add_tenant({"id": "b"})
    seen = store.changes()
    assert {state.tenant_id for state in seen.tenants} == {"a", "b"}
    assert store.changes(seen.revision).tenants == ()
    key = store.create_key("b")
    store.remove_tenant("a")
    after = {state.tenant_id: state for state in store.changes(seen.revision).tenants}
    assert after["a"].tenant is None
    assert after["b"].keys == (key.record,)


def test_names_with_control_characters_are_refused(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    with pytest.raises(InvalidRequest):
        store.create_key("acme", name="a\x00b")


def test_processes_that_change_the_store_at_once_lose_nothing(store_url: str) -> None:
    """Four open a store that one has just made, and add, revoke and change together."""
    rounds, names = 5, "abcd"
    with open_store(store_url) as store:
        store.add_tenant({"id": "shared"})
        start = store.changes().revision
        run_at_once([child("administer", store_url, name, str(rounds)) for name in names])
        assert len(store.tenants()) == 1 + rounds * len(names)
        keys = store.keys()
        assert sum(key.revoked_at is None for key in keys) == rounds * len(names) == len(keys) / 2
        assert store.tenant("shared").limits == Limits(max_input=rounds, max_output=rounds)
        assert store.changes().revision == start + len(names) * rounds * 5


def test_a_new_store_opened_by_several_processes_at_once_is_made_once(store_url: str) -> None:
    run_at_once([child("settle", store_url, "1") for _ in range(4)])
    database = open_database(store_url)
    with database.reading() as execute:
        assert execute("SELECT version FROM migrations ORDER BY version") == [(n + 1,) for n in range(len(MIGRATIONS))]
    assert migrate(database) == 0
    database.close()


def test_a_store_of_the_first_schema_is_brought_up_to_date_with_what_is_in_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old_release:
        old_release.setattr(migrations, "MIGRATIONS", MIGRATIONS[:1])
        with open_store(store_url) as store:
            store.add_tenant({"id": "acme"})
    with open_store(store_url) as store:
        assert store.tenant("acme").id == "acme"
        assert store.usage.spending(["2026-11"]) == {}


def test_usage_of_a_store_that_measured_nothing_is_kept_and_added_to(store_url: str) -> None:
    database = open_database(store_url)
    with database.migrating() as execute:
        for statement in [one for step in MIGRATIONS[:4] for one in step]:
            execute(statement)
        execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY)")
        execute("INSERT INTO migrations (version) VALUES (4)")
        execute("INSERT INTO usage_by_hour VALUES ('acme', 0, 'm', 'k', 1, 10, 0, 5, 7)")
        execute("INSERT INTO spending VALUES ('1970-01', 'acme', 15, 7)")
    database.close()
    with open_store(store_url) as store:
        store.usage.append([Usage("r", "acme", "k", "m", 5.0, 10, 0, 5, 7, 1, 250, 3)], now_s=5.0)
        assert store.usage.sums("acme", since_s=0, until_s=1) == [UsageSum(0, "m", 2, 20, 0, 10, 14, 250, 3)]
        assert store.usage.spending(["1970-01"]) == {("acme", "1970-01"): Spent(30, 14, 250)}


def test_a_store_of_a_newer_penstock_is_refused(store: Store, store_url: str) -> None:
    database = open_database(store_url)
    with database.writing() as execute:
        execute("INSERT INTO migrations (version) VALUES (99)")
    database.close()
    with pytest.raises(ConfigError, match="newer penstock"):
        open_store(store_url)


def test_a_transaction_that_fails_leaves_nothing(store: Store, store_url: str) -> None:
    database = open_database(store_url)
    with contextlib.suppress(ZeroDivisionError), database.writing() as execute:
        execute("INSERT INTO tenants (id, document) VALUES ('x', '{}')")
        raise ZeroDivisionError
    with pytest.raises(StoreUnavailable), database.writing() as execute:
        execute("INSERT INTO nowhere VALUES (1)")
    assert store.tenants() == []
    database.close()


@pytest.mark.parametrize("url", ["", "mysql://x/y", "sqlite://", "sqlite:///", "penstock.db"])
def test_a_url_of_no_known_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///path or postgresql://"):
        open_store(url)


def test_a_refused_url_does_not_show_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("mysql://penstock:hunter2@db/penstock")
    assert "hunter2" not in caught.value.message


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        open_store("postgresql://penstock:hunter2@127.0.0.1:1/penstock")
    assert "hunter2" not in caught.value.message


def test_a_sqlite_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "penstock.db"
    with open_store(f"sqlite:///{path}") as store:
        store.add_tenant({"id": "acme"})
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_path_that_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StoreUnavailable, match="cannot open the store"):
        open_store(f"sqlite:///{tmp_path}/file/penstock.db")
    (tmp_path / "text.db").write_text("this is no database, but it is long enough to be looked at" * 20)
    with pytest.raises(StoreUnavailable, match="does not work"):
        open_store(f"sqlite:///{tmp_path}/text.db")
