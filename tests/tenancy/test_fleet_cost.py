"""Cost of pools, and tenants' parts of it: all of it is paid by somebody, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.tenancy import fleet as rows
from penstock.tenancy.fleet import FleetSample
from penstock.tenancy.fleet_cost import NOBODY, FleetCost, cost_since, fleet_cost, share_out
from penstock.tenancy.prices import NANOS
from penstock.tenancy.store import Store
from penstock.tenancy.usage import HOUR_S, TenantUsage, Usage

NOON = 1_794_744_000  # 2026-11-15 12:00 UTC


def sample(hour: int, cost: float, pool: str = "p", minute: int = 30, **more: object) -> FleetSample:
    at = float(NOON + hour * HOUR_S + 60 * minute)
    return FleetSample(at, pool, cost=cost, costs={"active": cost}, **more)  # type: ignore[arg-type]


def use(tenant: str, hour: int, device_us: int, tokens: int = 10, pool: str = "p") -> TenantUsage:
    return TenantUsage(tenant, NOON + hour * HOUR_S, pool, tokens, device_us)


def paid(found: FleetCost) -> dict[str, float]:
    return {one.tenant: one.nanos / NANOS for one in found.tenants}


def test_idle_capacity_of_an_hour_is_paid_by_those_who_used_it() -> None:
    used = [use("a", 0, 3_000_000), use("b", 0, 1_000_000), use("b", 1, 1)]
    assert paid(fleet_cost(0.0, [sample(0, 2.0), sample(1, 1.0)], used)) == {"a": 1.5, "b": 1.5}


def test_hour_that_nobody_used_is_shared_by_the_use_of_all_hours() -> None:
    used = [use("a", 0, 3_000_000), use("b", 2, 1_000_000)]
    assert paid(fleet_cost(0.0, [sample(0, 2.0), sample(1, 4.0), sample(2, 2.0)], used)) == {"a": 5.0, "b": 3.0}


def test_replicas_that_measure_no_device_time_are_paid_by_the_token() -> None:
    used = [use("a", 0, 0, tokens=100), use("b", 0, 0, tokens=300)]
    assert paid(fleet_cost(0.0, [sample(0, 4.0)], used)) == {"a": 1.0, "b": 3.0}


def test_pool_that_nobody_used_costs_all_the_same() -> None:
    assert paid(fleet_cost(0.0, [sample(0, 4.0)], [use("a", 0, 1, pool="other")])) == {NOBODY: 4.0}


def test_sample_of_the_first_minute_belongs_to_its_hour() -> None:
    used = [use("a", 0, 1), use("b", 1, 1)]
    assert paid(fleet_cost(0.0, [sample(1, 4.0, minute=0), sample(1, 1.0, minute=1)], used)) == {"a": 4.0, "b": 1.0}


def test_documents_say_what_a_thousand_tokens_cost() -> None:
    history = [sample(0, 2.0, seconds={"active": 1800.0, "standby": 600.0})]
    found = fleet_cost(0.0, history, [use("a", 0, 900_000_000, tokens=4000)])
    (pool,), (tenant,) = found.document("pool"), found.document("tenant")
    assert (pool["cost_per_1000_tokens"], pool["busy"], pool["cost_by_state"]) == (0.5, 0.5, {"active": 2.0})
    assert (tenant["tenant"], tenant["cost"], tenant["cost_per_1000_tokens"]) == ("a", 2.0, 0.5)


TENANTS = st.sampled_from("abc")
USES = st.builds(use, TENANTS, st.integers(0, 3), st.integers(0, 10**9), st.integers(0, 9), st.sampled_from("pqz"))
SAMPLES = st.builds(sample, st.integers(0, 3), st.floats(0, 100), st.sampled_from("pq"), st.integers(0, 59))


@given(st.lists(SAMPLES, max_size=30), st.lists(USES, max_size=30))
def test_tenants_parts_are_the_pools_cost_to_the_nano(history: list[FleetSample], used: list[TenantUsage]) -> None:
    found = fleet_cost(0.0, history, used)
    for pool in found.pools:
        parts = [one.nanos for one in found.tenants if one.pool == pool.pool]
        assert sum(parts) == pool.nanos == sum(pool.by_state.values())
        assert all(part >= 0 for part in parts)


@given(st.integers(0, 10**15), st.dictionaries(st.text(max_size=3), st.integers(0, 10**12), min_size=1))
def test_parts_are_whole_and_within_one_of_the_ratio(total: int, weights: dict[str, int]) -> None:
    if not sum(weights.values()):
        return
    parts = share_out(total, weights)
    assert sum(parts.values()) == total
    whole = sum(weights.values())
    assert all(abs(parts[name] * whole - total * weight) < whole for name, weight in weights.items())


def test_cost_is_read_from_the_history_and_the_usage_book(store: Store) -> None:
    lease = store.fleet.take_lease("f", "a", None)
    assert lease is not None
    with store.fleet.fenced("f", lease) as execute:
        rows.write_sample(execute, sample(0, 3.0, minute=5))
        rows.write_sample(execute, sample(-1, 100.0))
    for tenant, device_us in (("acme", 2_000_000), ("zeta", 1_000_000)):
        usage = Usage(tenant, tenant, "k", "p", NOON + 60.0, 10, 0, 5, device_us=device_us)
        store.usage.append([usage], now_s=float(NOON))
    found = cost_since(store, NOON + 1800.0)
    assert paid(found) == {"acme": 2.0, "zeta": 1.0}
    assert found.since == NOON
