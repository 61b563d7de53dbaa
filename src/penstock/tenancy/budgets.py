"""Whether a tenant has tokens and money left for the day and the month: a running total in memory.

The total is what the store knew at the last refresh, from all gateways, plus what this one has recorded since. A check
touches two dictionaries. What other gateways spend is known about a second later: budgets bound spending over days, and
the limits bound what can be spent within that second.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable

from penstock.core.errors import BudgetExhausted
from penstock.tenancy.prices import NANOS
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import DAY_S, NOTHING, Spent, TenantPeriod, Usage, UsageBook, periods, spent_by_period

Totals = dict[TenantPeriod, Spent]


class Budgets:
    """`check` and `spend` belong to the thread that answers requests, `load` and `refresh` to the ledger's.

    They share no lock. Only the first thread changes `_recorded`, which counts up; the second replaces `_known`, in one
    assignment, by what the store has together with how much of `_recorded` that includes.
    """

    def __init__(self) -> None:
        self._recorded: Totals = {}
        self._known: tuple[Totals, Totals] = ({}, {})  # the store's, and the part of it that was recorded here
        self._asked: set[str] = set()  # tenants whose totals somebody wants to know
        self._day = ("", "")
        self._day_ends_s = 0.0

    def spend(self, usage: Usage) -> None:
        spent = Spent(usage.input_tokens + usage.output_tokens, usage.cost_nanos, usage.device_us)
        for period in self._periods(usage.at_s):
            key = usage.tenant_id, period
            self._recorded[key] = self._recorded.get(key, NOTHING) + spent

    def check(self, tenant: Tenant, now_s: float) -> None:
        """Raise if the day's or the month's budget is spent; until when, the error tells."""
        budget = tenant.budget
        if not budget.is_bounded:
            return
        self._asked.add(tenant.id)
        day, month = self._periods(now_s)
        if _is_spent(self.spent(tenant.id, day), budget.tokens_per_day, budget.money_per_day):
            raise _exhausted("day", DAY_S - now_s % DAY_S)
        if _is_spent(self.spent(tenant.id, month), budget.tokens_per_month, budget.money_per_month):
            raise _exhausted("month", _month_ends_s(now_s) - now_s)

    def spent(self, tenant_id: str, period: str) -> Spent:
        stored, included = self._known
        key = (tenant_id, period)
        return stored.get(key, NOTHING) + self._recorded.get(key, NOTHING) - included.get(key, NOTHING)

    def load(self, book: UsageBook, *, now_s: float) -> None:
        """Everybody's totals, at the start."""
        self._known = (book.spending(periods(now_s)), {})

    def refresh(self, book: UsageBook, written: Iterable[Usage], *, now_s: float) -> None:
        """The store has `written` by now; learn what it has of those that were asked about since the last time."""
        current = periods(now_s)
        stored, included = (
            {key: spent for key, spent in totals.items() if key[1] in current} for totals in self._known
        )
        for key, spent in spent_by_period(written).items():
            _count(stored, key, spent)
            _count(included, key, spent)
        self._known = (stored, included)
        asked, self._asked = self._asked, set()
        if asked:
            self._known = (stored | book.spending(current, tuple(asked)), included)

    def _periods(self, at_s: float) -> tuple[str, str]:
        """Returns the current periods, remembered for the day: a request's path is no place for calendars."""
        if not self._day_ends_s - DAY_S <= at_s < self._day_ends_s:
            if at_s >= self._day_ends_s:  # a new day; requests that end late may still belong to the last
                keep = (*periods(at_s), *periods(at_s - DAY_S))
                self._recorded = {key: spent for key, spent in self._recorded.items() if key[1] in keep}
            self._day, self._day_ends_s = periods(at_s), at_s - at_s % DAY_S + DAY_S
        return self._day


def _count(totals: Totals, key: TenantPeriod, spent: Spent) -> None:
    totals[key] = totals.get(key, NOTHING) + spent


def _is_spent(spent: Spent, tokens: int | None, money: float | None) -> bool:
    return (tokens is not None and spent.tokens >= tokens) or (money is not None and spent.cost_nanos >= money * NANOS)


def _month_ends_s(now_s: float) -> float:
    now = time.gmtime(now_s)
    return calendar.timegm((now.tm_year + now.tm_mon // 12, now.tm_mon % 12 + 1, 1, 0, 0, 0))


def _exhausted(period: str, wait_s: float) -> BudgetExhausted:
    return BudgetExhausted(
        f"this {period}'s budget is spent; the next {period} begins at midnight UTC", retry_after_s=wait_s
    )
