"""A benchmark's report: JSON for machines, Markdown for people and for docs/benchmarks.md. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.bench.measurement import Measurement, summarize
from penstock.bench.workloads import Workload
from penstock.core.errors import ConfigError

NOISY_SHARE = 0.1


@dataclass(frozen=True)
class ServerFacts:
    name: str
    ready_s: float | None
    rss_bytes: int | None  # of the process tree, after the last round


@dataclass(frozen=True)
class Report:
    command: str
    date: str
    hardware: str
    versions: dict[str, str]
    seed: str
    servers: list[ServerFacts]  # ours first, then its peers
    workloads: list[Workload]
    measurements: list[Measurement]


def markdown(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    rounds = 1 + max(one.round for one in report.measurements)
    parts = [
        f"    {report.command}",
        f"{report.date} · {report.hardware} · {versions} · medians of {rounds} round(s)",
        _LEGEND,
        table(WORKLOAD_COLUMNS, list(_workload_rows(report))),
        table(("server", "ready s", "RSS MB"), [_server_row(server) for server in report.servers]),
        "\n".join(f"- {note}" for note in notes(report)),
    ]
    return "\n\n".join(filter(None, parts))


WORKLOAD_COLUMNS = ("workload", "server", "out tok/s", "min–max", "TTFT ms", "TPOT ms", "ratio")
_LEGEND = (
    "Output tokens/s, and those of the slowest and the fastest round; TTFT is p50 / p99, TPOT is p50; the ratio is to "
    "the best peer's tokens/s."
)


def is_noisy(one: Measurement) -> bool:
    """Whether others took so much of the machine that a comparison says nothing: servers suffer from it unequally."""
    return one.foreign_cpu is not None and one.foreign_cpu > NOISY_SHARE


def notes(report: Report) -> Iterator[str]:
    """Yields what should keep a reader from trusting the tables."""
    workloads = {workload.name: workload for workload in report.workloads}
    for one in report.measurements:
        where = f"{one.server}, {one.workload}, round {one.round + 1}"
        expected = workloads[one.workload]
        if one.failures:
            yield f"{where}: {len(one.failures)} request(s) failed, the first with: {one.failures[0]}"
        for kind, counted, per_request in (
            ("prompt", one.prompt_tokens, expected.prompt_tokens),
            ("output", one.output_tokens, expected.output_tokens),
        ):
            if counted != one.num_answers * per_request:
                yield f"{where}: {counted:,} {kind} tokens instead of {one.num_answers * per_request:,}"
        if one.foreign_cpu is not None and is_noisy(one):
            yield f"{where}: others used {one.foreign_cpu:.0%} of the machine"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose source is aligned too, so that it reads well in a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def replace_section(document: str, name: str, body: str) -> str:
    """The document with `body` between its two markers of that name."""
    opening, closing = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    before, found, rest = document.partition(opening)
    _, found_end, after = rest.partition(closing)
    if not found or not found_end:
        raise ConfigError(f"the document lacks the lines {opening} and {closing} to write between")
    return f"{before}{opening}\n\n{body}\n\n{closing}{after}"


def _workload_rows(report: Report) -> Iterator[Sequence[str]]:
    ours, *peers = (server.name for server in report.servers)
    for workload in report.workloads:
        taken = [one for one in report.measurements if one.workload == workload.name]
        summaries = {
            server.name: summarize([one for one in taken if one.server == server.name]) for server in report.servers
        }
        best = max((summaries[peer].output_tok_s for peer in peers), default=None)
        for server, summary in summaries.items():
            ratio = _ratio(summary.output_tok_s, best, taken) if server == ours else ""
            yield (
                workload.name,
                server,
                f"{summary.output_tok_s:.0f}",
                f"{summary.slowest_tok_s:.0f}–{summary.fastest_tok_s:.0f}",
                f"{_ms(summary.ttft_p50_s)} / {_ms(summary.ttft_p99_s)}",
                _ms(summary.tpot_p50_s, digits=1),
                ratio,
            )


def _ratio(rate: float, best: float | None, taken: Sequence[Measurement]) -> str:
    if not best:
        return ""
    return "(noisy)" if any(map(is_noisy, taken)) else f"{rate / best:.2f}"


def _server_row(server: ServerFacts) -> Sequence[str]:
    ready = "" if server.ready_s is None else f"{server.ready_s:.1f}"
    rss = "" if server.rss_bytes is None else f"{server.rss_bytes / 2**20:,.0f}"
    return server.name, ready, rss


def _ms(seconds: float | None, digits: int = 0) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.{digits}f}"
