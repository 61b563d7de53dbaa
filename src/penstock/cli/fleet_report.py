"""`penstock fleet status` and `penstock fleet explain`: what the store knows of pools, replicas and decisions."""

from __future__ import annotations

import argparse
import time

import msgspec

from penstock.cli.store_flags import print_json, store_url
from penstock.fleet.policy.decision import Decision
from penstock.tenancy.store import open_store
from penstock.terminal.tables import print_table


def print_status(arguments: argparse.Namespace) -> None:
    with open_store(store_url(arguments.store, arguments.config)) as store:
        pools, replicas = store.fleet.pools(), store.fleet.replicas()
    if arguments.json:
        print_json({"pools": pools, "replicas": replicas})
        return
    if not pools:
        print("no controller has written to this store yet: `penstock fleet --config FILE` starts one")
        return
    now = time.time()
    print_table(
        ("POOL", "WANTED", "BOUNDS", "STATES", "SEEN", "WHY"),
        [
            (
                one.pool,
                str(one.wanted),
                f"{one.min}..{one.max}",
                ", ".join(f"{count} {state}" for state, count in sorted(one.states.items())) or "-",
                f"{now - one.at:.0f} s ago",
                one.reason or "-",
            )
            for one in pools
        ],
    )
    if replicas:
        print()
        print_table(
            ("REPLICA", "STATE", "FOR", "ZONE", "CAPACITY", "URL"),
            [
                (
                    one.id,
                    one.state if one.state == one.target else f"{one.state} -> {one.target}",
                    f"{now - one.since:.0f} s",
                    one.zone or "-",
                    one.capacity_type,
                    one.url or "-",
                )
                for one in replicas
            ],
        )


def print_decisions(arguments: argparse.Namespace) -> None:
    with open_store(store_url(arguments.store, arguments.config)) as store:
        found = store.fleet.decisions(arguments.pool, limit=arguments.last)
    decisions = [msgspec.json.decode(one.document, type=Decision) for one in found]
    if arguments.json:
        print_json(decisions)
        return
    for decision in reversed(decisions):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.at))
        bound = f" [{decision.bound}]" if decision.bound else ""
        print(f"{when} {decision.pool}: wanted {decision.wanted}{bound}: {decision.reason}")
        if decision.numbers:
            print("    " + ", ".join(f"{name} {value:g}" for name, value in decision.numbers.items()))
        for action in decision.actions:
            print(f"    {action.kind} {action.replica or 'a new replica'}: {action.reason}")
    if not decisions:
        print("no decision is recorded")
