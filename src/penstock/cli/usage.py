"""`penstock usage TENANT`: what a tenant used, from the ledger that every gateway writes."""

from __future__ import annotations

import argparse
import time

from penstock.cli.store_flags import add_store_flags, moment, print_json, print_table, store_from
from penstock.tenancy.prices import NANOS
from penstock.tenancy.usage import HOUR_S, UsageSum

_SUMMED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")


def add_usage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    usage = commands.add_parser("usage", help="what a tenant used")
    usage.add_argument("tenant", metavar="TENANT", help="its id; that of a removed tenant too")
    usage.add_argument(
        "--since", type=moment, metavar="WHEN",
        help="2026-11-15, 2026-11-15T12:00 (UTC), or how long ago: 24h, 7d; in whole hours (default: this month)",
    )  # fmt: skip
    usage.add_argument("--until", type=moment, metavar="WHEN", help="in the same words (default: now)")
    usage.add_argument("--by", choices=["hour", "day", "all"], default="day", help="one line per (default: day)")
    add_store_flags(usage)


def run_usage(arguments: argparse.Namespace) -> None:
    now_s = time.time()
    since_s = _month_began_s(now_s) if arguments.since is None else arguments.since
    until_s = now_s + HOUR_S if arguments.until is None else arguments.until
    with store_from(arguments) as store:
        sums = store.usage.sums(arguments.tenant, since_s=since_s, until_s=until_s, by=arguments.by)
        if not sums:
            store.tenant(arguments.tenant)  # nothing used, or no such tenant?
    total = {name: sum(getattr(one, name) for one in sums) for name in _SUMMED}
    if arguments.json:
        rows = [_document(one, arguments.by) for one in sums]
        print_json({"tenant": arguments.tenant, "since": _iso(since_s), "usage": rows, "total": _priced(total)})
    else:
        _print(sums, total, arguments.by)


def _print(sums: list[UsageSum], total: dict[str, int], by: str) -> None:
    head = ("WHEN", "MODEL", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "COST")
    rows = [(_when(one, by), one.model, *_numbers({name: getattr(one, name) for name in _SUMMED})) for one in sums]
    print_table(head, [*rows, ("total", "", *_numbers(total))])


def _numbers(counts: dict[str, int]) -> list[str]:
    *tokens, nanos = counts.values()
    return [*(f"{count:,}" for count in tokens), f"{nanos / NANOS:,.4f}" if nanos else "-"]


def _document(one: UsageSum, by: str) -> dict[str, object]:
    counts = _priced({name: getattr(one, name) for name in _SUMMED})
    return {**({} if by == "all" else {"start": _iso(one.start_s)}), "model": one.model, **counts}


def _priced(counts: dict[str, int]) -> dict[str, object]:
    return {
        **{name: count for name, count in counts.items() if name != "cost_nanos"},
        "cost": counts["cost_nanos"] / NANOS,
    }


def _when(one: UsageSum, by: str) -> str:
    shape = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "all": "all"}[by]
    return time.strftime(shape, time.gmtime(one.start_s))


def _iso(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def _month_began_s(now_s: float) -> float:
    return moment(time.strftime("%Y-%m-01", time.gmtime(now_s)))
