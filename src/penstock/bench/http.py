"""`penstock bench cpu` and `bench http`, from servers to a report: ours and its peers in turns."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from penstock import __version__
from penstock.bench.machine import cpu_name, num_cores, tree_usage
from penstock.bench.measurement import Measurement
from penstock.bench.report import Report, ServerFacts
from penstock.bench.rounds import run_rounds
from penstock.bench.servers import Server, attach, started
from penstock.bench.workloads import Workload
from penstock.core.errors import ConfigError
from penstock.hub.resolve import describe
from penstock.terminal.progress import ProgressBar
from penstock.text.tokenizer import Tokenizer
from penstock.workload.words import single_token_words

OURS = "penstock"


def bench_http(
    *,
    model: str,
    urls: Sequence[tuple[str, str]],
    serve: Sequence[str] | None,
    workloads: Sequence[Workload],
    num_rounds: int,
    command: str,
) -> Report:
    """`urls` are (name, url) of servers that run already; `serve` is the command that starts ours, where none of them
    is ours; None: they are all there is. `command` is what the user typed."""
    files = describe(model, progress=ProgressBar())  # pulled now, so that ready_s is that of a cached model
    words = single_token_words(Tokenizer.load(files.tokenizer_source))
    seed = str(int(time.time()))  # a peer that was measured before must not find these prompts in its cache
    measurements = []
    with _servers(urls, serve) as servers:
        for one in run_rounds(servers, workloads, words, num_rounds=num_rounds, seed=seed):
            measurements.append(one)
            _say(one)
        facts = [ServerFacts(server.name, server.ready_s, _rss_bytes(server)) for server in servers]
    return Report(
        command=command,
        date=datetime.date.today().isoformat(),
        hardware=f"{cpu_name()}, {num_cores()} cores",
        versions=_versions(),
        seed=seed,
        servers=facts,
        workloads=list(workloads),
        measurements=measurements,
    )


@contextmanager
def _servers(urls: Sequence[tuple[str, str]], serve: Sequence[str] | None) -> Iterator[list[Server]]:
    """Ours first."""
    if len({name for name, _ in urls}) < len(urls):
        raise ConfigError("two servers have the same name", param="url")
    attached = sorted((attach(name, url) for name, url in urls), key=lambda server: server.name != OURS)
    if serve is None or (attached and attached[0].name == OURS):
        yield attached
    else:
        with started(OURS, serve) as ours:
            yield [ours, *attached]


def _say(one: Measurement) -> None:
    ttft = "no answer" if one.ttft_p50_s is None else f"TTFT p50 {1000 * one.ttft_p50_s:,.0f} ms"
    print(f"round {one.round + 1}  {one.workload:8}  {one.server}: {one.output_tok_s:.0f} tok/s, {ttft}", flush=True)


def _rss_bytes(server: Server) -> int | None:
    return None if server.pid is None else tree_usage(server.pid).rss_bytes


def _versions() -> dict[str, str]:
    versions = {OURS: __version__, "Python": platform.python_version()}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return versions
