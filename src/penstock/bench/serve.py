"""`penstock bench serve`: from what the user asked to a report. It sends one load after another to one server."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from penstock import __version__
from penstock.bench.board import Board
from penstock.bench.client import Client
from penstock.bench.lag import raise_file_limit
from penstock.bench.load import Load, Run
from penstock.bench.machine import cpu_name, num_cores
from penstock.bench.objective import Objective
from penstock.bench.point import Point, make_point
from penstock.bench.served import Served, Vocabulary, find_served, find_vocabulary, measure_scale
from penstock.bench.speech import Endpoint, Speech
from penstock.core.errors import ConfigError
from penstock.workload.arrivals import Process, arrival_times
from penstock.workload.conversations import Replayed, Source, Synthetic
from penstock.workload.lengths import Lengths
from penstock.workload.own import Own, read_own
from penstock.workload.trace import read_trace
from penstock.workload.words import Scale

DEFAULT_REQUESTS = 100
SPARE_TOKENS = 8  # of the context: a template's, where the count is not exact


@dataclass(frozen=True)
class Target:
    """The server, and how it is spoken to."""

    url: str
    model: str | None = None  # None: the first it names
    endpoint: Endpoint = "chat"
    api_key: str | None = None
    timeout_s: float = 600.0
    new_connections: bool = False
    ignore_eos: bool = True
    fields: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    context: int | None = None  # None: as the server says


@dataclass(frozen=True)
class Asked:
    """The requests that are asked of it: made up, unless there is a trace or a file of your own."""

    prompt: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    output: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    turns: Lengths = field(default_factory=lambda: Lengths("fixed", 1))
    think_s: float = 0.0
    shared_tokens: int = 0
    num_prefixes: int = 1
    trace: Path | None = None
    own: Path | None = None
    speed: float = 1.0
    first: int = 0
    count: int | None = None


@dataclass(frozen=True)
class LoadShape:
    """The shape of a load: so many clients, or a rate, or (neither) the workload's own times."""

    concurrency: int | None = None
    rate: float | None = None
    process: Process = "poisson"
    burstiness: float = 1.0

    @property
    def label(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return "as timed" if self.rate is None else f"{self.rate:g} req/s"


@dataclass(frozen=True)
class Report:
    kind: str  # serve or saturation
    command: str
    date: str
    url: str
    model: str
    endpoint: str
    workload: str
    tokenizer: str
    seed: str
    slo: Objective | None
    machine: str
    versions: dict[str, str]
    notes: list[str]
    points: list[Point] = field(default_factory=list)


class Bench:
    """One server under one workload, load after load. `async with Bench.ready(...)` asks it what must be known."""

    def __init__(
        self,
        client: Client,
        served: Served,
        speech: Speech,
        vocabulary: Vocabulary,
        scale: Scale,
        source: Source,
        board: Board,
        objective: Objective | None,
        seed: str,
    ) -> None:
        self.served = served
        self.vocabulary = vocabulary
        self.scale = scale
        self.source = source
        self.board = board
        self._objective = objective
        self._seed = seed
        self._client = client
        self._load = Load(client, speech, board, count_tokens=vocabulary.count)
        self._next = 0  # conversation: no two loads ask the same

    @classmethod
    async def ready(
        cls, target: Target, asked: Asked, board: Board, *, objective: Objective | None, seed: str
    ) -> Bench:
        raise_file_limit()
        client = Client(
            target.url, api_key=target.api_key, timeout_s=target.timeout_s, new_connections=target.new_connections
        )
        served = await find_served(client, target.model)
        served = served if target.context is None else replace(served, context=target.context)
        speech = Speech(served.model, target.endpoint, target.ignore_eos, target.fields)
        vocabulary = await find_vocabulary(client, served.model, target.tokenizer)
        has_system = asked.shared_tokens > 0 and target.endpoint == "chat"
        scale = await measure_scale(client, speech, vocabulary.words, seed, has_system=has_system)
        source = _source(asked, vocabulary, scale, served, seed)
        return cls(client, served, speech, vocabulary, scale, source, board, objective, seed)

    def close(self) -> None:
        self._client.close()

    async def warm_up(self, num_requests: int) -> None:
        """Their figures are not kept, nor what they asked."""
        self.board.begin("warm-up", num_requests, None)
        await self._load.closed(self.source, concurrency=min(num_requests, 4), total=num_requests, first=self._next)
        self._next += num_requests

    async def point(
        self,
        shape: LoadShape,
        *,
        num_requests: int | None,
        duration_s: float | None,
        drain_s: float | None = None,
        is_shown: bool = True,
    ) -> tuple[Point, bool]:
        """The figures of one load, and whether the user interrupted it."""
        num_requests = self._available(num_requests)
        self.board.begin(shape.label if is_shown else None, num_requests, duration_s)
        limits: dict[str, Any] = {"total": num_requests, "first": self._next, "duration_s": duration_s}
        if shape.concurrency is not None:
            run = await self._load.closed(self.source, concurrency=shape.concurrency, **limits)
        else:
            run = await self._load.open(self.source, self._times(shape), drain_s=drain_s, **limits)
        self._next += run.num_conversations
        load = shape.concurrency or shape.rate or _rate(run)
        return make_point(shape.label, load, run, self._objective), run.was_interrupted

    def _available(self, num_requests: int | None) -> int | None:
        if self.source.count is None:
            return num_requests
        left = self.source.count - self._next
        if left <= 0:
            raise ConfigError("the trace has no requests left for another load; --count says how many are read")
        return left if num_requests is None else min(num_requests, left)

    def _times(self, shape: LoadShape) -> Iterator[float]:
        if shape.rate is not None:
            source = Random(f"{self._seed} arrivals {self._next}")
            return arrival_times(shape.process, shape.rate, source, burstiness=shape.burstiness)
        began_s = self.source.at_s(self._next) or 0.0
        return ((self.source.at_s(number) or 0.0) - began_s for number in count(self._next))


async def bench_serve(
    target: Target,
    asked: Asked,
    shapes: list[LoadShape],
    *,
    num_requests: int | None,
    duration_s: float | None,
    warm_up: int,
    objective: Objective | None,
    seed: str,
    command: str,
    board: Board,
) -> Report:
    bench = await Bench.ready(target, asked, board, objective=objective, seed=seed)
    report = new_report("serve", bench, target, asked, objective=objective, seed=seed, command=command)
    if num_requests is None and duration_s is None:
        num_requests = bench.source.num_lines if isinstance(bench.source, Own) else None
        num_requests = DEFAULT_REQUESTS if num_requests is None and bench.source.count is None else num_requests
    if not shapes:
        shapes = [LoadShape(concurrency=1) if bench.source.at_s(0) is None else LoadShape()]
    try:
        if warm_up:
            await bench.warm_up(warm_up)
        for number, shape in enumerate(shapes, 1):
            if len(shapes) > 1:
                board.step = f"step {number} of {len(shapes)}"
                board.after_s = duration_s and duration_s * (len(shapes) - number)
            point, was_interrupted = await bench.point(shape, num_requests=num_requests, duration_s=duration_s)
            report.points.append(point)
            if was_interrupted:
                break
    finally:
        bench.close()
    return report


def new_report(
    kind: str, bench: Bench, target: Target, asked: Asked, *, objective: Objective | None, seed: str, command: str
) -> Report:
    notes = []
    if isinstance(bench.source, Replayed) and (num_clipped := bench.source.num_clipped):
        notes.append(
            f"{num_clipped} of {bench.source.count} requests of the trace are longer than the context of "
            f"{bench.served.context:,} tokens and were cut to it"
        )
    if abs(bench.scale.tokens_per_word - 1) > 0.01:
        notes.append(
            f"a word is {bench.scale.tokens_per_word:.2f} tokens by the server's usage: lengths are right on the "
            "average, not each"
        )
    return Report(
        kind=kind,
        command=command,
        date=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        url=target.url,
        model=bench.served.model,
        endpoint=target.endpoint,
        workload=describe_asked(asked),
        tokenizer=bench.vocabulary.origin,
        seed=seed,
        slo=objective,
        machine=f"{cpu_name()}, {num_cores()} cores",
        versions={"penstock": __version__, "Python": platform.python_version()},
        notes=notes,
    )


def describe_asked(asked: Asked) -> str:
    if asked.trace is not None:
        return f"{asked.trace.name} at {asked.speed:g} times its speed"
    if asked.own is not None:
        return asked.own.name
    parts = [f"prompts of {asked.prompt} tokens", f"answers of {asked.output}"]
    if str(asked.turns) != "1":
        parts.append(f"{asked.turns} turns, {asked.think_s:g} s of thought between them")
    if asked.shared_tokens:
        of = f", {asked.num_prefixes} of them" if asked.num_prefixes > 1 else ""
        parts.append(f"a system prompt of {asked.shared_tokens}{of}")
    return ", ".join(parts)


def _source(asked: Asked, vocabulary: Vocabulary, scale: Scale, served: Served, seed: str) -> Source:
    context = None if served.context is None else served.context - SPARE_TOKENS
    if asked.trace is not None:
        arrivals = read_trace(asked.trace, asked.first, asked.count)
        return Replayed(arrivals, vocabulary.words, scale, seed, speed=asked.speed, context=context)
    if asked.own is not None:
        lines = read_own(asked.own, asked.first, asked.count)
        return Own(lines, vocabulary.words, scale, seed, asked.output, asked.speed)
    return Synthetic(
        vocabulary.words,
        scale,
        seed,
        asked.prompt,
        asked.output,
        asked.turns,
        asked.think_s,
        asked.shared_tokens,
        asked.num_prefixes,
        context,
    )


def _rate(run: Run) -> float:
    return run.num_conversations / run.window_s if run.window_s else 0.0
