"""Many simulated rollouts: how many regressions were found, how late, and how many equal versions were aborted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import comb
from statistics import median

from penstock.rollout.policy.plan import RolloutPlan
from penstock.rollout.policy.state import Phase
from penstock.sim.rollout.run import Outcome, run_rollout
from penstock.sim.rollout.traffic import Regression, World

REGRESSIONS = {
    one.name: one
    for one in (
        Regression("none"),
        Regression("tpot+5%", tpot=1.05),
        Regression("tpot+10%", tpot=1.1),
        Regression("tpot+25%", tpot=1.25),
        Regression("ttft+25%", ttft=1.25),
        Regression("errors+0.5%", errors=0.005),
        Regression("errors+50%", errors=0.5),
        Regression("answers10%", answers=0.1),
        Regression("answers20%", answers=0.2),
        Regression("tenant-tpot+25%", tpot=1.25, tenant=2),
    )
}


@dataclass(frozen=True)
class Summary:
    """A summary of all runs with one regression."""

    regression: str
    runs: int
    aborted: int
    in_shadow: int  # aborted before a client was served
    paused: int
    promoted: int
    steps: dict[int, int]  # aborts by step, from 1
    gates: dict[str, int]  # aborts by gate
    exposed: float  # clients' requests that the new version answered before the abort; the median
    exposed_most: int
    abort_s: float  # from the start to the abort; the median
    promote_s: float  # from the start until all clients stay; the median

    @property
    def aborted_share(self) -> float:
        return self.aborted / self.runs

    @property
    def upper_bound(self) -> float:
        """The upper bound of the probability of an abort, at 95 % confidence: Clopper and Pearson's."""
        return clopper_pearson(self.aborted, self.runs)


def simulate(
    regressions: Sequence[Regression],
    seeds: range,
    plan: RolloutPlan,
    world: World | None = None,
    *,
    jobs: int = 1,
) -> Iterator[Outcome]:
    """Outcomes in the order of regressions and seeds, each as soon as it is there."""
    asked = [(regression, seed) for regression in regressions for seed in seeds]
    run = partial(_run, plan=plan, world=world)
    if jobs == 1:
        yield from map(run, asked)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, asked)


def _run(asked: tuple[Regression, int], plan: RolloutPlan, world: World | None) -> Outcome:
    regression, seed = asked
    return run_rollout(seed, regression, plan, world)


def summarise(outcomes: Iterable[Outcome]) -> list[Summary]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.regression, []).append(outcome)
    return [_summary(name, of) for name, of in groups.items()]


def _summary(name: str, outcomes: Sequence[Outcome]) -> Summary:
    aborted = [outcome for outcome in outcomes if outcome.is_aborted]
    promoted = [outcome for outcome in outcomes if outcome.phase is Phase.PROMOTED]
    return Summary(
        name,
        len(outcomes),
        len(aborted),
        sum(not outcome.exposed for outcome in aborted),
        sum(outcome.phase is Phase.PAUSED for outcome in outcomes),
        len(promoted),
        dict(sorted(Counter(outcome.step + 1 for outcome in aborted).items())),
        dict(Counter(gate for outcome in aborted for gate in outcome.gates).most_common()),
        median([outcome.exposed for outcome in aborted] or [0]),
        max((outcome.exposed for outcome in aborted), default=0),
        median([outcome.seconds for outcome in aborted] or [0.0]),
        median([outcome.seconds for outcome in promoted] or [0.0]),
    )


def clopper_pearson(hits: int, runs: int, alpha: float = 0.05) -> float:
    """The largest probability with which so few hits are not too unlikely."""
    if hits >= runs:
        return 1.0
    low, high = hits / runs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        likely = sum(comb(runs, k) * middle**k * (1.0 - middle) ** (runs - k) for k in range(hits + 1))
        low, high = (middle, high) if likely > alpha else (low, middle)
    return high


_COLUMNS: Sequence[tuple[str, Callable[[Summary], str]]] = (
    ("planted", lambda s: s.regression),
    ("runs", lambda s: f"{s.runs:,}"),
    ("aborted", lambda s: f"{s.aborted_share:.1%}"),
    ("before a client", lambda s: f"{s.in_shadow / s.runs:.1%}"),
    ("promoted", lambda s: f"{s.promoted / s.runs:.1%}"),
    ("paused", lambda s: f"{s.paused / s.runs:.1%}"),
    ("aborts by step", lambda s: ", ".join(f"{step}: {count}" for step, count in s.steps.items()) or "-"),
    ("clients' requests before, median (most)", lambda s: _few(s, f"{s.exposed:,.0f} ({s.exposed_most:,})")),
    ("minutes to the abort", lambda s: _few(s, f"{s.abort_s / 60:,.1f}")),
    ("minutes to promote", lambda s: f"{s.promote_s / 60:,.0f}" if s.promoted else "-"),
)
HEAD: Sequence[str] = [name for name, _ in _COLUMNS]


def _few(summary: Summary, text: str) -> str:
    return text if summary.aborted else "-"


def rows(summaries: Sequence[Summary]) -> list[list[str]]:
    return [[show(summary) for _, show in _COLUMNS] for summary in summaries]


def markdown(summaries: Sequence[Summary]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [HEAD, *rows(summaries)]]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(HEAD) - 1), *lines[1:]])
