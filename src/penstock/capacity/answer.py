"""All that a plan says: the layout to take, what it was chosen from, what else could be done, the way to a budget."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.capacity import report
from penstock.capacity.changes import Outcome, alternatives, path
from penstock.capacity.formats import KV, WEIGHTS, Formats, kv_format, weight_format
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.plan import Case, Layout, Setup, best, cheapest, layouts
from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class Bill:
    """The bill of a month: what is paid today and what should be, with the setup it begins from."""

    name: str  # of where it begins
    start: str  # what that is, in words
    cost_per_month: float
    goal: float
    setup: Setup


@dataclass(frozen=True)
class Answer:
    case: Case
    chosen: Layout
    judged: list[Layout]  # on the chosen GPU
    formats: list[tuple[Formats, Layout | None]]  # on the chosen GPU
    alternatives: list[Outcome]
    bill: Bill | None = None
    steps: list[Outcome] | None = None  # to the bill's goal


def answer(
    case: Case, setup: Setup, *, gpus: Collection[str] = (), budget: float | None = None, bill: Bill | None = None
) -> Answer:
    """`gpus`: those to choose from; none: all of the table. `budget` is a goal for the plan itself, where nothing runs
    yet; a `bill` has a goal of its own, and the plan is then where its steps lead to."""
    gpus = gpus or case.hardware
    if not any(case.hardware[name].supports(setup.formats) for name in gpus):
        raise ConfigError(f"{', '.join(gpus)}: no fp8 there; choose bf16, int8 or int4 weights and a bf16 KV cache")
    chosen = cheapest(case, setup, gpus)
    if chosen is None:
        raise ConfigError(_impossible(case, setup, gpus), param="ttft")
    if bill is None and budget is not None:
        bill = Bill(
            "as asked", f"{chosen.num_gpus:,} x {chosen.setup.gpu}", chosen.cost_per_month, budget, chosen.setup
        )
    steps = path(case, bill.setup, bill.cost_per_month, bill.goal, gpus=gpus) if bill else None
    if steps:
        case, chosen = replace(case, demand=steps[-1].change.demand), steps[-1].layout
    setup = replace(chosen.setup, parallelism=None)
    return Answer(
        case=case,
        chosen=chosen,
        judged=layouts(case, setup),
        formats=[
            (formats, best(case, replace(setup, formats=formats)))
            for formats in _formats(setup)
            if case.hardware[setup.gpu].supports(formats)
        ],
        alternatives=alternatives(case, chosen.setup),
        bill=bill,
        steps=steps,
    )


def text(answer: Answer, name: str) -> str:
    case, chosen = answer.case, answer.chosen
    parts = [report.head(case, name, chosen.setup.formats)]
    if answer.bill and answer.steps is not None:
        bill = answer.bill
        parts.append(report.path_table(bill.name, bill.start, bill.cost_per_month, bill.goal, answer.steps))
    parts += [
        report.need(case, chosen),
        report.parallelism(case, chosen, answer.judged),
        report.formats_table(case, answer.formats, chosen.setup.gpu),
        report.alternatives_table(chosen, answer.alternatives),
        report.assumptions(case, chosen),
    ]
    return "\n\n".join(parts)


def as_json(answer: Answer, name: str) -> bytes:
    case, per = answer.case, answer.case.demand.profile
    model = ModelBytes(case.config, answer.chosen.setup.formats)
    document = {
        "model": {
            "name": name,
            "parameters": case.config.num_parameters,
            "active_parameters": case.config.num_active_parameters,
            "weight_bytes": model.stored_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
        },
        "asked": {
            "rate": case.demand.rate,
            "prompt_tokens": per.prompt_tokens,
            "output_tokens": per.output_tokens,
            "prefix_share": case.demand.prefix_share,
            "target": case.demand.target,
        },
        "chosen": answer.chosen,
        "layouts": answer.judged,
        "formats": [{"formats": formats, "layout": layout} for formats, layout in answer.formats],
        "alternatives": [_outcome(each) for each in answer.alternatives],
        "bill": answer.bill,
        "steps": [_outcome(each) for each in answer.steps] if answer.steps is not None else None,
    }
    return msgspec.json.format(msgspec.json.encode(document))


def _outcome(outcome: Outcome) -> dict[str, Any]:
    change = outcome.change
    return {
        "change": change.name,
        "in_return": change.price.name.lower(),
        "note": change.note,
        "layout": outcome.layout,
    }


def _formats(setup: Setup) -> Iterator[Formats]:
    for weights in WEIGHTS:
        for kv in KV:
            yield replace(setup.formats, weights=weight_format(weights), kv=kv_format(kv))


def _impossible(case: Case, setup: Setup, gpus: Collection[str]) -> str:
    """Returns why nothing does, GPU by GPU, and what would."""
    target, why = case.demand.target, []
    for name in gpus:
        if not case.hardware[name].supports(setup.formats):
            why.append(f"{name}: it has no fp8")
            continue
        judged = layouts(case, replace(setup, gpu=name))
        alone = [each.alone for each in judged if each.alone]
        if not alone:
            why.append(f"{name}: the model does not fit")
            continue
        ttft = f"TTFT {min(each.ttft_p_s for each in alone) * 1000:,.0f} ms"
        tpots = [each.tpot_p50_s for each in alone if each.tpot_p50_s is not None]
        why.append(f"{name}: at best {ttft}" + (f", TPOT {min(tpots) * 1000:,.1f} ms" if tpots else ""))
    asked = [f"{n} {v * 1000:,.0f} ms" for n, v in (("TTFT", target.ttft_s), ("TPOT", target.tpot_s)) if v is not None]
    return (
        f"nothing keeps {' and '.join(asked) or 'all requests in memory'} in {setup.formats}, even alone on a replica "
        f"({'; '.join(why)}). Ask for more time, shorter prompts, or smaller weights (--quant fp8)"
    )
