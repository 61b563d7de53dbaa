"""Changes that one could make: single ones, to a setup or to what is asked, and what each one asks in return.

`alternatives` puts them side by side; `path` takes one after the other until a bill is small enough: first those that
cost nothing but work, then those that may cost quality, then other hardware, and last those that cost latency.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from penstock.capacity.demand import Demand, Target
from penstock.capacity.formats import SHORT
from penstock.capacity.plan import Case, Layout, Setup, best

WORTH = 0.02  # of the bill: a change that saves less is not worth its trouble
HYPOTHETICAL_SHARE = 0.5


class Price(IntEnum):
    """The price of a change, in the order in which one would try."""

    WORK = 0
    QUALITY = 1
    HARDWARE = 2
    LATENCY = 3


@dataclass(frozen=True)
class Change:
    name: str
    price: Price
    setup: Setup
    demand: Demand
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    change: Change
    layout: Layout


def changes(case: Case, setup: Setup) -> Iterator[Change]:
    """Each alone, from where we are. With other formats or another GPU, parallelism is chosen anew."""
    free = replace(setup, parallelism=None)
    demand, formats = case.demand, setup.formats
    if setup.parallelism is not None:
        yield Change("other parallelism", Price.WORK, free, demand)
    if not setup.uses_prefix_cache and demand.prefix_share:
        note = "requests go where their prompt's beginning is cached"
        cached = replace(setup, uses_prefix_cache=True)
        yield Change("prefix cache and routing by it", Price.WORK, cached, demand, note)
    for name in case.hardware:
        if name != setup.gpu:
            yield Change(f"on {name}", Price.HARDWARE, replace(free, gpu=name), demand)
    if formats.kv != "fp8":
        yield Change("KV fp8", Price.QUALITY, replace(free, formats=replace(formats, kv="fp8")), demand)
    for weights in ("fp8", "int8", "int4"):
        if formats.weights == "bfloat16" or (weights == "int4" and formats.weights not in ("int4", "mxfp4")):
            changed = replace(free, formats=replace(formats, weights=weights))
            yield Change(f"weights {SHORT.get(weights, weights)}", Price.QUALITY, changed, demand)
    yield from _slower(free, demand)


def _slower(setup: Setup, demand: Demand) -> Iterator[Change]:
    target = demand.target
    if target.ttft_s is not None:
        later = replace(target, ttft_s=target.ttft_s * 2)
        yield Change("TTFT 2 times as long", Price.LATENCY, setup, replace(demand, target=later))
    if target.tpot_s is not None:
        slower = replace(target, tpot_s=target.tpot_s * 2)
        yield Change("TPOT 2 times as long", Price.LATENCY, setup, replace(demand, target=slower))
    if target.ttft_s is not None or target.tpot_s is not None:
        unbound = replace(demand, target=Target(None, None, target.percentile))
        yield Change("batch: no latency target", Price.LATENCY, setup, unbound, "only what can wait")


def outcome(case: Case, change: Change) -> Outcome | None:
    found = best(replace(case, demand=change.demand), change.setup)
    return Outcome(change, found) if found else None


def alternatives(case: Case, setup: Setup) -> list[Outcome]:
    """All single changes and the strongest combination that keeps the targets, cheapest first."""
    free = replace(setup, parallelism=None)
    tried = [*changes(case, setup), *_combined(case, free), *_prefixes(case, free)]
    found = [each for change in tried if (each := outcome(case, change))]
    return sorted(found, key=lambda each: each.layout.rank)


def _combined(case: Case, setup: Setup) -> Iterator[Change]:
    if setup.formats.weights == "bfloat16" and setup.formats.kv != "fp8":
        small = replace(setup.formats, weights="fp8", kv="fp8")
        for name in case.hardware:
            where, note = ("", "") if name == setup.gpu else (f" on {name}", "other hardware")
            changed = replace(setup, gpu=name, formats=small)
            yield Change(f"weights and KV fp8{where}", Price.QUALITY, changed, case.demand, note)


def _prefixes(case: Case, setup: Setup) -> Iterator[Change]:
    """Yields the change that shows what sharing is worth: without what there is, or with what there might be."""
    if case.demand.prefix_share and setup.uses_prefix_cache:
        without = replace(setup, uses_prefix_cache=False)
        yield Change("without a prefix cache", Price.WORK, without, case.demand, "what it is worth")
    elif not case.demand.prefix_share:
        shared = replace(case.demand, prefix_share=HYPOTHETICAL_SHARE)
        note = "if prompts share that much: system prompts, sessions"
        yield Change(f"prefix cache that hits {HYPOTHETICAL_SHARE:.0%}", Price.WORK, setup, shared, note)


def path(case: Case, setup: Setup, start_cost: float, goal: float, *, gpus: Collection[str]) -> list[Outcome]:
    """The largest saving first, of those that ask least in return; it ends under the goal, or where nothing helps.

    `gpus` are those that may be moved to.
    """
    taken: list[Outcome] = []
    cost = start_cost
    if (sized := best(case, setup)) and sized.cost_per_month < cost * (1 - WORTH):
        right_size = Change("as many replicas as the load needs", Price.WORK, setup, case.demand)
        taken.append(Outcome(right_size, sized))
        cost = sized.cost_per_month
    for price in Price:
        while cost > goal:
            open_to_us = (each for each in changes(case, setup) if each.setup.gpu in (setup.gpu, *gpus))
            tried = [outcome(case, change) for change in open_to_us if change.price == price]
            found = min((each for each in tried if each), key=lambda each: each.layout.rank, default=None)
            if found is None or found.layout.cost_per_month > cost * (1 - WORTH):
                break
            taken.append(found)
            cost, setup = found.layout.cost_per_month, found.change.setup
            case = replace(case, demand=found.change.demand)
    return taken
