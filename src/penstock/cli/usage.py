"""`penstock usage TENANT`: what a tenant used, from the ledger that every gateway writes."""

from __future__ import annotations

import argparse
import time

from penstock.cli.store_flags import add_store_flags, moment, print_json, print_table, store_from
from penstock.tenancy.documents import STEPS, SUMMED, UsageReport
from penstock.tenancy.prices import NANOS
from penstock.tenancy.usage import UsageSum


def add_usage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    usage = commands.add_parser("usage", help="what a tenant used")
    usage.add_argument("tenant", metavar="TENANT", help="its id; that of a removed tenant too")
    usage.add_argument(
        "--since", type=moment, metavar="WHEN",
        help="2026-11-15, 2026-11-15T12:00 (UTC), or how long ago: 24h, 7d; in whole hours (default: this month)",
    )  # fmt: skip
    usage.add_argument("--until", type=moment, metavar="WHEN", help="in the same words (default: now)")
    usage.add_argument("--by", choices=STEPS, default="day", help="one line per (default: day)")
    add_store_flags(usage)


def run_usage(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        report = UsageReport(
            store, arguments.tenant, by=arguments.by, since_s=arguments.since, until_s=arguments.until
        )  # fmt: skip
    if arguments.json:
        print_json(report.document())
    else:
        _print(report)


def _print(report: UsageReport) -> None:
    head = ("WHEN", "MODEL", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "COST")
    rows = [
        (_when(one, report.by), one.model, *_numbers({name: getattr(one, name) for name in SUMMED}))
        for one in report.sums
    ]
    print_table(head, [*rows, ("total", "", *_numbers(report.total))])


def _numbers(counts: dict[str, int]) -> list[str]:
    *tokens, nanos = counts.values()
    return [*(f"{count:,}" for count in tokens), f"{nanos / NANOS:,.4f}" if nanos else "-"]


def _when(one: UsageSum, by: str) -> str:
    shape = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "all": "all"}[by]
    return time.strftime(shape, time.gmtime(one.start_s))
