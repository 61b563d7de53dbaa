"""`penstock usage`: what tenants used, from the ledger that every gateway writes; all of them, or one in detail."""

from __future__ import annotations

import argparse
import time

from penstock.cli.store_flags import add_store_flags, moment, print_json, store_from
from penstock.core.errors import InvalidValue
from penstock.tenancy.documents import STEPS, SUMMED, UsageReport
from penstock.tenancy.prices import NANOS
from penstock.tenancy.store import Store
from penstock.tenancy.usage import NOTHING, Spent, UsageSum, periods
from penstock.terminal.tables import print_table


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tenant",
        metavar="TENANT",
        nargs="?",
        help="its id, that of a removed one too; `anonymous`: who had no key (default: all, today and this month)",
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="WHEN",
        help="2026-11-15, 2026-11-15T12:00 (UTC), or how long ago: 24h, 7d; in whole hours (default: this month)",
    )
    parser.add_argument("--until", type=moment, metavar="WHEN", help="in the same words (default: now)")
    parser.add_argument("--by", choices=STEPS, help="one line per (default: day)")
    add_store_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        if arguments.tenant is None:
            _show_all(store, arguments)
            return
        report = UsageReport(
            store, arguments.tenant, by=arguments.by or "day", since_s=arguments.since, until_s=arguments.until
        )
    if arguments.json:
        print_json(report.document())
    else:
        _print(report)


def _show_all(store: Store, arguments: argparse.Namespace) -> None:
    if arguments.since or arguments.until or arguments.by:
        raise InvalidValue("--since, --until and --by are for the usage of one TENANT")
    day, month = periods(time.time())
    spent = store.usage.spending([day, month])
    found = {tenant: [spent.get((tenant, period), NOTHING) for period in (day, month)] for tenant, _ in sorted(spent)}
    if arguments.json:
        print_json(
            [{"tenant": tenant, "today": _document(t), "month": _document(m)} for tenant, (t, m) in found.items()]
        )
    elif not found:
        print(f"nothing was used in {month}")
    else:
        head = ("TENANT", "TOKENS TODAY", "DEVICE S", "COST", f"TOKENS IN {month}", "DEVICE S", "COST")
        print_table(head, [(tenant, *_shown(today), *_shown(month)) for tenant, (today, month) in found.items()])


def _document(spent: Spent) -> dict[str, float]:
    return {"tokens": spent.tokens, "device_s": spent.device_us / 1e6, "cost": spent.cost_nanos / NANOS}


def _shown(spent: Spent) -> tuple[str, ...]:
    return f"{spent.tokens:,}", *_used(spent.device_us, spent.cost_nanos)


def _used(device_us: int, cost_nanos: int) -> tuple[str, str]:
    """`-`: nothing was measured, or has a price."""
    return f"{device_us / 1e6:,.3f}" if device_us else "-", f"{cost_nanos / NANOS:,.4f}" if cost_nanos else "-"


def _print(report: UsageReport) -> None:
    head = ("WHEN", "MODEL", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "DEVICE S", "COST")
    rows = [
        (_when(one, report.by), one.model, *_numbers({name: getattr(one, name) for name in SUMMED}))
        for one in report.sums
    ]
    print_table(head, [*rows, ("total", "", *_numbers(report.total))])


def _numbers(counts: dict[str, int]) -> list[str]:
    *tokens, device_us, _, nanos = counts.values()
    return [*(f"{count:,}" for count in tokens), *_used(device_us, nanos)]


def _when(one: UsageSum, by: str) -> str:
    shape = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "all": "all"}[by]
    return time.strftime(shape, time.gmtime(one.start_s))
