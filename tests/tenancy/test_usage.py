"""What is on disk, on both databases."""

import time

import pytest

from penstock.tenancy.store import Store
from penstock.tenancy.usage import DAY_S, HOUR_S, REMEMBER_S, Spent, Usage, UsageSum, periods
from tests.tenancy.children import child, run_at_once

NOON = 1_794_744_000  # 2026-11-15 12:00 UTC


def used(request_id: str, at_s: float = NOON, *, tenant: str = "acme", model: str = "m", key: str = "k") -> Usage:
    return Usage(
        request_id,
        tenant,
        key,
        model,
        at_s,
        input_tokens=10,
        cached_tokens=4,
        output_tokens=5,
        cost_nanos=7,
        device_us=9,
        kv_block_ms=2,
    )


def test_a_request_is_counted_once_however_often_it_is_reported(store: Store) -> None:
    book = store.usage
    assert book.append([used("a"), used("b"), used("a")], now_s=NOON) == 2
    assert book.append([used("b"), used("c")], now_s=NOON) == 1
    assert book.sums("acme", since_s=0, until_s=NOON + 1) == [
        UsageSum(NOON - 12 * HOUR_S, "m", 3, 30, 12, 15, 21, 27, 6)
    ]
    assert book.spending(periods(NOON)) == dict.fromkeys(
        [("acme", "2026-11-15"), ("acme", "2026-11")], Spent(45, 21, 27)
    )


def test_sums_are_per_model_and_hour_or_day_or_all_together(store: Store) -> None:
    records = [
        used("a"),
        used("b", NOON + 10, key="other"),
        used("c", NOON + HOUR_S),
        used("d", model="n"),
        used("e", NOON + DAY_S),
        used("f", tenant="other"),
    ]
    store.usage.append(records, now_s=NOON)
    for by, expected in {
        "hour": [(NOON, "m", 2), (NOON, "n", 1), (NOON + HOUR_S, "m", 1), (NOON + DAY_S, "m", 1)],
        "day": [(NOON - DAY_S // 2, "m", 3), (NOON - DAY_S // 2, "n", 1), (NOON + DAY_S // 2, "m", 1)],
        "all": [(0, "m", 4), (0, "n", 1)],
    }.items():
        sums = store.usage.sums("acme", since_s=NOON, until_s=NOON + 2 * DAY_S, by=by)  # type: ignore[arg-type]
        assert [(one.start_s, one.model, one.requests) for one in sums] == expected


def test_only_the_time_asked_for_is_summed(store: Store) -> None:
    store.usage.append([used("a"), used("b", NOON + HOUR_S), used("c", NOON + 2 * HOUR_S)], now_s=NOON)
    found = store.usage.sums("acme", since_s=NOON + HOUR_S + 5, until_s=NOON + 2 * HOUR_S, by="hour")
    assert [one.start_s for one in found] == [NOON + HOUR_S]


def test_a_batch_may_be_larger_than_a_statement(store: Store) -> None:
    batch = [used(f"r{i}", tenant=f"t{i % 600}") for i in range(1501)]
    assert store.usage.append(batch, now_s=NOON) == 1501
    assert store.usage.append(batch, now_s=NOON) == 0
    found = store.usage.spending(["2026-11"], [f"t{i}" for i in range(600)])
    assert sum(spent.tokens for spent in found.values()) == 1501 * 15
    assert found == store.usage.spending(["2026-11"])


def test_only_the_tenants_asked_for_are_told(store: Store) -> None:
    store.usage.append([used("a"), used("b", tenant="other")], now_s=NOON)
    assert store.usage.spending(["2026-11"], ["acme", "nobody"]) == {("acme", "2026-11"): Spent(15, 7, 9)}


def test_what_was_counted_long_ago_is_forgotten_but_its_sum_is_not(store: Store) -> None:
    store.usage.append([used("a")], now_s=NOON)
    store.usage.forget_settled(now_s=NOON + REMEMBER_S - 1)
    assert store.usage.append([used("a")], now_s=NOON) == 0
    store.usage.forget_settled(now_s=NOON + REMEMBER_S + 1)
    assert store.usage.append([used("a")], now_s=NOON) == 1
    assert store.usage.spending(["2026-11"])["acme", "2026-11"].tokens == 30


def test_gateways_that_report_the_same_requests_at_once_count_them_once(store: Store, store_url: str) -> None:
    rounds = 10
    run_at_once([child("settle", store_url, str(rounds)) for _ in range(4)])
    spent = store.usage.spending(periods(time.time())[1:])
    assert sum(one.tokens for one in spent.values()) == rounds * 50


@pytest.mark.parametrize(
    ("at_s", "names"), [(NOON, ("2026-11-15", "2026-11")), (1_798_761_599, ("2026-12-31", "2026-12"))]
)
def test_periods_are_days_and_months_in_utc(at_s: float, names: tuple[str, str]) -> None:
    assert periods(at_s) == names
