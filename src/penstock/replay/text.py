"""A report as somebody reads it in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator

from penstock.replay.estimate import Spread
from penstock.replay.report import Changed, Log, Outcome, Report
from penstock.terminal.tables import aligned

RECORDED = "recorded"


def lines(report: Report) -> Iterator[str]:
    yield from _log(report.log)
    yield ""
    yield from _estimate(report)
    yield ""
    yield from _policies(report)
    if len(report.others) == 1:
        ((name, outcome),) = report.others.items()
        yield ""
        yield from _shares(report.recorded, name, outcome)
        if outcome.changed:
            yield ""
            yield "What would change most, by the router's own estimate of the time to a first token:"
            for changed in outcome.changed:
                yield from _changed(changed)
    yield ""
    yield "How far to believe it:"
    for limit in report.limits:
        yield f"- {limit}"


def _log(log: Log) -> Iterator[str]:
    when = [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s)) for at_s in (log.first_s, log.last_s)]
    yield f"{log.num_requests:,} requests for {', '.join(log.models)}, {when[0]} to {when[1]} UTC, by {_names(log)}"
    sent_on = log.num_choices - log.num_requests
    yield f"{log.num_free:,} of {log.num_choices:,} choices were among several replicas" + (
        f"; {sent_on:,} sent a request on" if sent_on else ""
    )


def _names(log: Log) -> str:
    return ", ".join(name for name, _ in sorted(log.strategies.items(), key=lambda item: -item[1]))


def _estimate(report: Report) -> Iterator[str]:
    judged = report.estimate
    if judged.measured is None:
        return
    rows = [("measured", *_times(judged.measured), "", "")]
    for name, found in (("estimated by the router", judged.router), ("the same, fitted", judged.fitted)):
        if found is not None:
            rows.append((name, *_times(found.estimated), ms(found.mean_error_s), f"{found.explained:.0%}"))
    rows.append(("the mean, for all", "", "", "", ms(judged.mean_alone_error_s), "0%"))
    yield f"Time to the first token of {judged.num_measured:,} requests, where they really went:"
    yield from aligned([("", "MEAN", "P50", "P95", "MEAN ERROR", "EXPLAINS"), *rows])


def _policies(report: Report) -> Iterator[str]:
    how = "with what that would have changed" if report.carries else "each choice alone"
    yield f"What others would have done, {how}; times are estimates{', fitted' if report.is_fitted else ''}:"
    head = ("", "SAME", "BUSIEST", "REUSED", "TTFT MEAN", "P50", "P95", "CHANGE")
    tokens = report.log.prompt_tokens
    rows = [_row(f"{RECORDED} ({_names(report.log)})", report.recorded, tokens, "")]
    rows += [_row(name, outcome, tokens, _more(outcome)) for name, outcome in report.others.items()]
    yield from aligned([head, *rows])


def _row(name: str, outcome: Outcome, prompt_tokens: int, more: str) -> tuple[str, ...]:
    busiest = max((share.computed for share in outcome.shares.values()), default=0.0)
    reused = f"{outcome.reused_tokens / prompt_tokens:.1%}" if prompt_tokens else "-"
    times = _times(outcome.ttft) if outcome.ttft is not None else ("-", "-", "-")
    return (name, f"{outcome.agreement:.0%}", f"{busiest:.0%}", reused, *times, more)


def _more(outcome: Outcome) -> str:
    return f"{1000 * outcome.more_s:+,.0f} ±{1000 * outcome.more_error_s:,.0f} ms" if outcome.ttft is not None else "-"


def _shares(recorded: Outcome, name: str, other: Outcome) -> Iterator[str]:
    rows = []
    for replica in sorted({*recorded.shares, *other.shares}):
        row = [replica]
        for outcome in (recorded, other):
            share = outcome.shares.get(replica)
            row += [f"{share.requests:.0%}", f"{share.computed:.0%}"] if share is not None else ["0%", "0%"]
        rows.append(row)
    yield from aligned([("", "REQUESTS", "COMPUTED", name, "COMPUTED"), *rows])


def _changed(changed: Changed) -> Iterator[str]:
    measured = f" (measured {ms(changed.measured_s)})" if changed.measured_s is not None else ""
    yield (
        f"{changed.id}: {changed.prompt_tokens:,} tokens, {changed.recorded} {ms(changed.recorded_s)}{measured} -> "
        f"{changed.other} {ms(changed.other_s)}"
    )
    yield f"    {changed.because}"
    yield f"    was:   {changed.recorded_route}"
    yield f"    would: {changed.other_route}"


def _times(found: Spread) -> tuple[str, str, str]:
    return ms(found.mean_s), ms(found.p50_s), ms(found.p95_s)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
