import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest, PermissionDenied, Unauthenticated
from penstock.tenancy.keys import ApiKey, KeyRing, NewKey, TenantState, key_id_of, new_key
from penstock.tenancy.tenants import Tenant

KEYS = [new_key(f"t{index % 3}", now_s=0) for index in range(6)]


def test_keys_are_random_and_long_enough() -> None:
    assert len({key.secret for key in (new_key("acme", now_s=0) for _ in range(1000))}) == 1000
    assert re.fullmatch(r"psk_[0-9A-Za-z]{10}_[0-9A-Za-z]{32}", KEYS[0].secret)


def test_neither_the_record_nor_any_repr_has_the_secret() -> None:
    key = KEYS[0]
    secret = key.secret.rpartition("_")[2]
    for text in (repr(key), str(key), f"{key}", repr(key.record)):
        assert secret not in text
    assert key.record.prefix in repr(key)


def test_an_id_is_found_in_whatever_somebody_has_of_a_key() -> None:
    key = KEYS[0]
    for text in (key.secret, key.record.prefix, key.record.id):
        assert key_id_of(text) == key.record.id


@pytest.mark.parametrize("text", ["", "psk_", "psk_short", "acme", "sk-something", "0123456789x", "012345678é"])
def test_what_is_no_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        key_id_of(text)
    assert not text or text == "psk_" or text not in caught.value.message


def test_an_inactive_tenant_is_told_so() -> None:
    ring = KeyRing()
    ring.apply([TenantState("t0", Tenant("t0", is_active=False), (KEYS[0].record,))])
    with pytest.raises(PermissionDenied, match="not active"):
        ring.authenticate(KEYS[0].secret.encode(), 0)


@pytest.mark.parametrize(
    "wrong",
    [b"", b"psk_", b"\xff\x00", KEYS[0].record.hash.encode(), KEYS[0].secret.encode()[:-1]],
    ids=["nothing", "a beginning", "bytes", "the hash", "one letter less"],  # keys differ from process to process
)
def test_a_wrong_key_is_refused_and_not_repeated(wrong: bytes) -> None:
    ring = KeyRing()
    ring.apply([TenantState("t0", Tenant("t0"), (KEYS[0].record,))])
    with pytest.raises(Unauthenticated) as caught:
        ring.authenticate(wrong, 0)
    assert "psk_" not in caught.value.message


def test_removing_the_last_tenant_does_not_open_the_door() -> None:
    ring = KeyRing()
    assert not ring.has_had_tenants
    ring.apply([TenantState("t0", Tenant("t0"), ())])
    ring.apply([TenantState("t0", None)])
    assert ring.has_had_tenants


states = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.sampled_from(range(6)), unique=True)), max_size=20
)


@given(states)
def test_the_ring_is_what_the_latest_states_say(history: list[tuple[int, bool, list[int]]]) -> None:
    ring = KeyRing()
    expected: dict[str, set[str]] = {}
    for number, is_there, chosen in history:
        tenant_id = f"t{number}"
        keys: list[NewKey] = [KEYS[index] for index in chosen if KEYS[index].record.tenant_id == tenant_id]
        records: tuple[ApiKey, ...] = tuple(key.record for key in keys) if is_there else ()
        ring.apply([TenantState(tenant_id, Tenant(tenant_id) if is_there else None, records)])
        expected[tenant_id] = {record.id for record in records}
    for key in KEYS:
        if key.record.id in expected.get(key.record.tenant_id, ()):
            assert ring.authenticate(key.secret.encode(), 0).tenant.id == key.record.tenant_id
        else:
            with pytest.raises(Unauthenticated):
                ring.authenticate(key.secret.encode(), 0)
    assert len(ring._callers) == sum(map(len, expected.values()))
