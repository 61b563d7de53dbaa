"""The figures of one load: what its results come to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.bench.lag import GeneratorHealth, doubts
from penstock.bench.load import Result, Run
from penstock.bench.objective import Objective
from penstock.bench.spread import Spread


@dataclass(frozen=True)
class Row:
    """A request in the JSON report; seconds since the load began."""

    conversation: int
    turn: int
    intended_s: float
    sent_s: float
    first_s: float | None
    ended_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str | None


@dataclass(frozen=True)
class Point:
    label: str  # what was asked for: "concurrency 4", "5 req/s", "trace"
    load: float  # the number in it
    wall_s: float
    window_s: float  # in which requests were sent
    num_requests: int
    num_answers: int
    errors: dict[str, int]  # by kind
    examples: dict[str, str]  # of each kind the first message
    prompt_tokens: int  # as the server counted them
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Spread | None  # from the intended time, as are all but the next
    ttft_from_send: Spread | None
    tpot: Spread | None
    gap: Spread | None
    e2e: Spread | None
    goodput_per_s: float | None  # requests that kept the SLO; None: there is none
    slo_share: float | None  # of all requests, failed ones among them
    in_flight: list[int]  # at even times over the window
    health: GeneratorHealth
    doubts: list[str]  # why these figures are not to be trusted
    notes: list[str]
    requests: list[Row] = field(default_factory=list)


IN_FLIGHT_SAMPLES = 100


def make_point(label: str, load: float, run: Run, objective: Objective | None) -> Point:
    results = run.results
    answers = [one for one in results if one.error is None]
    errors = Counter(one.error for one in results if one.error is not None)
    kept = sum(objective.is_kept(one) for one in results) if objective else 0
    ttft = Spread.of([one.ttft_s for one in answers if one.ttft_s is not None])
    tpot = Spread.of([one.tpot_s for one in answers if one.tpot_s is not None])
    prompt_tokens, output_tokens = (sum(one.prompt_tokens for one in answers), sum(o.output_tokens for o in answers))
    wall_s = run.wall_s or 1e-9
    return Point(
        label=label,
        load=load,
        wall_s=run.wall_s,
        window_s=run.window_s,
        num_requests=len(results),
        num_answers=len(answers),
        errors=dict(errors.most_common()),
        examples={kind: next(one.message for one in results if one.error == kind) for kind in errors},
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(one.cached_tokens for one in answers),
        output_tokens=output_tokens,
        requests_per_s=len(answers) / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        ttft=ttft,
        ttft_from_send=Spread.of([one.ttft_from_send_s for one in answers if one.ttft_from_send_s is not None]),
        tpot=tpot,
        gap=Spread.of([gap for one in answers for gap in one.gaps]),
        e2e=Spread.of([one.e2e_s for one in answers if one.e2e_s is not None]),
        goodput_per_s=kept / wall_s if objective else None,
        slo_share=kept / len(results) if objective and results else None,
        in_flight=in_flight(results, run.window_s),
        health=run.health,
        doubts=doubts(run.health, ttft=ttft, tpot=tpot),
        notes=_notes(run, answers),
        requests=[_row(one) for one in sorted(results, key=lambda one: one.intended_s)],
    )


def in_flight(results: Sequence[Result], window_s: float, samples: int = IN_FLIGHT_SAMPLES) -> list[int]:
    """Returns how many waited for their answers' ends, at the ends of that many equal parts of the window."""
    changes = sorted([(one.intended_s, 1) for one in results] + [(one.ended_s, -1) for one in results])
    found, running, index = [], 0, 0
    for sample in range(1, samples + 1):
        at_s = window_s * sample / samples
        while index < len(changes) and changes[index][0] <= at_s:
            running += changes[index][1]
            index += 1
        found.append(running)
    return found


def _notes(run: Run, answers: Sequence[Result]) -> list[str]:
    found = []
    if run.was_interrupted:
        found.append("it was interrupted: these are the figures of what had run")
    if short := sum(one.output_tokens < one.asked_tokens for one in answers):
        found.append(f"{short} of {len(answers)} answers are shorter than asked for")
    if answers and not any(one.prompt_tokens for one in answers):
        found.append("the server does not report usage: output tokens are counted here, prompt tokens are not known")
    return found


def _row(one: Result) -> Row:
    return Row(
        one.number,
        one.turn,
        one.intended_s,
        one.sent_s,
        one.first_s,
        one.ended_s,
        one.ttft_s,
        one.tpot_s,
        one.e2e_s,
        one.prompt_tokens,
        one.cached_tokens,
        one.output_tokens,
        one.error,
    )
