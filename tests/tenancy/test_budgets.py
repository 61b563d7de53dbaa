import pytest

from penstock.core.errors import BudgetExhausted, StoreUnavailable
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.prices import NANOS
from penstock.tenancy.store import Store
from penstock.tenancy.tenants import Budget, Tenant
from penstock.tenancy.usage import DAY_S, Spent, Usage, UsageBook

NOON = 1_794_744_000.0  # 2026-11-15 12:00 UTC
DAY = "2026-11-15"


def tenant(**budget: float) -> Tenant:
    return Tenant("acme", budget=Budget(**budget))  # type: ignore[arg-type]


def used(request_id: str, tokens: int, at_s: float = NOON, cost: float = 0) -> Usage:
    return Usage(request_id, "acme", "k", "m", at_s, output_tokens=tokens, cost_nanos=int(cost * NANOS))


def test_a_tenant_without_a_budget_may_spend_for_ever() -> None:
    budgets = Budgets()
    budgets.spend(used("a", 10**12))
    budgets.check(tenant(), NOON)


@pytest.mark.parametrize(
    ("budget", "period", "wait_s"),
    [
        ({"tokens_per_day": 100}, "day", DAY_S / 2),
        ({"tokens_per_month": 100}, "month", 15.5 * DAY_S),
        ({"money_per_day": 0.5}, "day", DAY_S / 2),
        ({"money_per_month": 0.5, "tokens_per_day": 101}, "month", 15.5 * DAY_S),
    ],
)
def test_a_spent_budget_refuses_until_its_period_ends(budget: dict[str, float], period: str, wait_s: float) -> None:
    budgets = Budgets()
    budgets.spend(used("a", 99, cost=0.499))
    budgets.check(tenant(**budget), NOON)
    budgets.spend(used("b", 1, cost=0.001))
    with pytest.raises(BudgetExhausted, match=f"this {period}'s budget") as caught:
        budgets.check(tenant(**budget), NOON)
    assert caught.value.retry_after_s == wait_s
    budgets.check(tenant(**budget), NOON + wait_s)  # the answer was true


def test_the_month_after_december_is_january() -> None:
    budgets = Budgets()
    christmas = 1_798_200_000.0  # 2026-12-25 12:00 UTC
    budgets.spend(used("a", 1, christmas))
    with pytest.raises(BudgetExhausted) as caught:
        budgets.check(tenant(tokens_per_month=1), christmas)
    assert caught.value.retry_after_s == 6.5 * DAY_S


def test_a_gateway_begins_with_what_was_spent_before(store: Store) -> None:
    store.usage.append([used("a", 100)], now_s=NOON)
    budgets = Budgets()
    budgets.load(store.usage, now_s=NOON)
    with pytest.raises(BudgetExhausted):
        budgets.check(tenant(tokens_per_day=100), NOON)


def test_what_is_written_is_counted_once_and_what_others_spend_is_learned(store: Store) -> None:
    ours, acme = Budgets(), tenant(tokens_per_day=1000)
    ours.load(store.usage, now_s=NOON)
    ours.check(acme, NOON)
    batch = [used("a", 10), used("b", 20)]
    for usage in batch:
        ours.spend(usage)
    assert ours.spent("acme", DAY) == Spent(30, 0)
    store.usage.append([*batch, used("another gateway's", 500)], now_s=NOON)
    ours.spend(used("c", 5))  # while the batch was being written
    ours.refresh(store.usage, batch, now_s=NOON)
    assert ours.spent("acme", DAY) == Spent(535, 0)
    ours.refresh(store.usage, [], now_s=NOON)
    assert ours.spent("acme", DAY) == Spent(535, 0)


def test_a_store_that_goes_away_after_the_write_does_not_count_it_twice(store: Store) -> None:
    budgets, batch = Budgets(), [used("a", 10)]

    class Gone(UsageBook):
        def spending(self, *_: object) -> dict[tuple[str, str], Spent]:
            raise StoreUnavailable("gone")

    budgets.spend(batch[0])
    budgets.check(tenant(tokens_per_day=1000), NOON)
    store.usage.append(batch, now_s=NOON)
    with pytest.raises(StoreUnavailable):
        budgets.refresh(Gone(store._database), batch, now_s=NOON)
    assert budgets.spent("acme", DAY) == Spent(10, 0)
    budgets.check(tenant(tokens_per_day=1000), NOON)
    budgets.refresh(store.usage, [], now_s=NOON)
    assert budgets.spent("acme", DAY) == Spent(10, 0)


def test_a_new_day_begins_at_nothing_and_old_days_are_not_kept() -> None:
    budgets, acme = Budgets(), tenant(tokens_per_day=10)
    for day in range(100):
        at_s = NOON + day * DAY_S
        budgets.check(acme, at_s)
        budgets.spend(used(f"r{day}", 10, at_s))
        with pytest.raises(BudgetExhausted):
            budgets.check(acme, at_s)
    assert len(budgets._recorded) <= 4


def test_a_request_that_ends_late_belongs_to_the_day_it_ended() -> None:
    budgets, midnight = Budgets(), NOON + DAY_S / 2
    budgets.spend(used("a", 10, midnight + 1))
    budgets.spend(used("late", 7, midnight - 1))
    budgets.spend(used("b", 10, midnight + 2))
    assert (budgets.spent("acme", DAY).tokens, budgets.spent("acme", "2026-11-16").tokens) == (7, 20)
    assert budgets.spent("acme", "2026-11").tokens == 27
