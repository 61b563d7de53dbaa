"""Signs from the objectives: budgets that burn, targets that are nearly or quite used up, a first token far too
late."""

from __future__ import annotations

from penstock.core.slo import TIMED, Objective
from penstock.watch.alerts import Condition
from penstock.watch.burn import MIN_BAD, MIN_TIMES, NAMES
from penstock.watch.kinds import AT_RISK, BURNING, BURNING_FAST, TTFT_FAR_OVER, Severity
from penstock.watch.objectives import WARNING, Burning, ModelObjectives, state_of

_FAR, _FAR_QUANTILE = 2.0, 0.99


def slo_conditions(objectives: ModelObjectives, now: float) -> list[Condition]:
    found = [_burning(objectives.model, one) for one in objectives.burning(now)]
    part, count = objectives.recent(Objective.TTFT, _FAR_QUANTILE, now)
    if part is not None and part > _FAR and count >= MIN_TIMES:
        seconds = part * objectives.slo.ttft_s
        summary = f"{objectives.model}: TTFT p99 is {seconds:.2f} s, {part:.1f} times its target"
        found.append(
            Condition(
                kind=TTFT_FAR_OVER,
                summary=summary,
                value=seconds,
                model=objectives.model,
                about=(objectives.model, Objective.TTFT),
            )
        )
    for objective in objectives.kept:
        used = objectives.used(objective, now) if objective in TIMED else objectives.budget_used(objective, now)
        if used is not None and used >= WARNING and _says_something(objectives, objective, now):
            found.append(_at_risk(objectives.model, objective, used))
    return found


def _says_something(objectives: ModelObjectives, objective: Objective, now: float) -> bool:
    """A time's quantile is of the last hour; a budget is of all its days, and a few failures early on use up none."""
    if objective in TIMED:
        return objectives.last_hour(objective, now).total >= MIN_TIMES
    return objectives.events(objective).bad >= MIN_BAD


def _burning(model: str, found: Burning) -> Condition:
    rule, objective = found.rule, found.objective
    kind = BURNING_FAST if rule.severity is Severity.PAGE else BURNING
    long, short = NAMES[rule.long_s], NAMES[rule.short_s]
    summary = f"{model}: the {objective} budget burns {found.rate:.1f} times too fast (over {long} and {short})"
    return Condition(
        kind=kind,
        summary=summary,
        value=found.rate,
        model=model,
        labels=(("objective", str(objective)),),
        about=(model, objective),
    )


def _at_risk(model: str, objective: Objective, used: float) -> Condition:
    level = state_of(used)
    what = "target" if objective in TIMED else "budget"
    summary = f"{model}: {used:.0%} of the {objective} {what} is used"
    labels = (("objective", str(objective)), ("level", level))
    return Condition(kind=AT_RISK, summary=summary, value=used, model=model, labels=labels, about=(model, objective))
