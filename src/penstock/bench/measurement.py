"""Numbers from loads: one measurement per server, workload and round, and the middle of several. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from penstock.bench.load import Run
from penstock.bench.spread import percentile


@dataclass(frozen=True)
class Measurement:
    server: str
    workload: str
    round: int
    wall_s: float
    num_answers: int
    failures: list[str]
    prompt_tokens: int  # the sums over all answers, as the server counted them
    cached_tokens: int
    output_tokens: int
    output_tok_s: float
    ttft_p50_s: float | None  # None: no answer, or no answer of two tokens
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    client_cpu: float  # share of the machine's cores that the load generator used
    foreign_cpu: float | None  # … and others than it and the server; None: unknown


@dataclass(frozen=True)
class Summary:
    """One server on one workload: medians over the rounds, each on its own, and how far the rounds lie apart."""

    output_tok_s: float
    slowest_tok_s: float
    fastest_tok_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None


def measurement(
    server: str, workload: str, round_: int, run: Run, *, client_cpu: float, foreign_cpu: float | None
) -> Measurement:
    answers = [one for one in run.results if one.error is None]
    ttfts = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    tpots = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    output_tokens = sum(answer.output_tokens for answer in answers)
    return Measurement(
        server=server,
        workload=workload,
        round=round_,
        wall_s=run.wall_s,
        num_answers=len(answers),
        failures=[f"{one.error} {one.message}".strip() for one in run.results if one.error is not None],
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        output_tokens=output_tokens,
        output_tok_s=output_tokens / run.wall_s,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p99_s=percentile(tpots, 99),
        client_cpu=client_cpu,
        foreign_cpu=foreign_cpu,
    )


def summarize(rounds: Sequence[Measurement]) -> Summary:
    rates = [one.output_tok_s for one in rounds]
    return Summary(
        output_tok_s=median(rates),
        slowest_tok_s=min(rates),
        fastest_tok_s=max(rates),
        ttft_p50_s=_median([one.ttft_p50_s for one in rounds]),
        ttft_p99_s=_median([one.ttft_p99_s for one in rounds]),
        tpot_p50_s=_median([one.tpot_p50_s for one in rounds]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
