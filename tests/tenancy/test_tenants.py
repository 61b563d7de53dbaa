import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.core.request import Priority
from penstock.tenancy.tenants import Budget, Limits, PriorityClass, Tenant, tenant_from, with_changes


def test_a_new_tenant_may_use_every_model_and_no_adapter_without_limits() -> None:
    tenant = tenant_from({"id": "acme"})
    assert tenant.may_use_model("anything/at:all")
    assert not tenant.may_use_adapter("someone-elses")
    assert tenant.limits == Limits(smooth=False)
    assert not tenant.budget.is_bounded
    assert (tenant.priority, tenant.is_active) == (PriorityClass.STANDARD, True)


def test_an_allow_list_holds_names_and_patterns_and_an_empty_one_allows_nothing() -> None:
    tenant = tenant_from({"id": "acme", "models": ["smollm2", "llama-*"], "adapters": ["acme/*"]})
    assert all(tenant.may_use_model(name) for name in ("smollm2", "llama-8b"))
    assert not any(tenant.may_use_model(name) for name in ("smollm", "SMOLLM2", "my-llama-8b", ""))
    assert [tenant.may_use_adapter(name) for name in ("acme/sql", "other/sql")] == [True, False]
    assert not tenant_from({"id": "acme", "models": []}).may_use_model("smollm2")


def test_classes_are_the_engines_priorities_by_other_names() -> None:
    assert [one.priority for one in PriorityClass] == list(Priority)


@pytest.mark.parametrize("tenant_id", ["", "Acme", "a b", "-a", "a/b", "a" * 64, "ä", "a\n", "../x"])
def test_an_id_is_a_plain_word(tenant_id: str) -> None:
    with pytest.raises(InvalidRequest, match="id"):
        tenant_from({"id": tenant_id})


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"limit": {}}, r"unknown field 'limit'; did you mean 'limits'"),
        ({"limits": {"concurency": 3}}, r"'limits.concurency'; did you mean 'concurrency'"),
        ({"limits": {"concurrency": 0}}, "concurrency"),
        ({"limits": {"concurrency": "3"}}, "concurrency"),
        ({"limits": {"burst_s": 10}}, "burst_s"),
        ({"limits": {"smooth": 1}}, "smooth"),
        ({"limits": [1]}, "limits"),
        ({"budget": {"money_per_day": 0}}, "money_per_day"),
        ({"priority": "urgent"}, "urgent"),
        ({"models": "smollm2"}, "models"),
        ({"name": "a\x00"}, "name"),
        ({"name": "a\n"}, "name"),
    ],
)
def test_a_bad_value_names_its_field(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        tenant_from({"id": "acme", **values})


def test_an_id_never_changes() -> None:
    with pytest.raises(InvalidRequest, match="never changes"):
        with_changes(Tenant("acme"), {"id": "other"})


counts = st.none() | st.integers(1, 2**53)
tenants = st.builds(
    Tenant,
    id=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True),
    limits=st.builds(Limits, counts, counts, st.booleans(), counts, counts, counts),
    budget=st.builds(Budget, counts, counts, st.none() | st.floats(0.01, 1e9)),
    models=st.lists(st.sampled_from(["*", "a", "b-*"])).map(tuple),
    priority=st.sampled_from(PriorityClass),
    route_headers=st.booleans(),
    is_active=st.booleans(),
)


@given(tenants, tenants)
def test_a_tenant_survives_json_and_becomes_another_by_its_fields(tenant: Tenant, other: Tenant) -> None:
    assert msgspec.json.decode(msgspec.json.encode(tenant), type=Tenant) == tenant
    fields = {name: getattr(other, name) for name in Tenant.__struct_fields__ if name != "id"}
    for section in ("limits", "budget"):
        fields[section] = msgspec.structs.asdict(fields[section])
    assert with_changes(tenant, fields) == msgspec.structs.replace(other, id=tenant.id)
