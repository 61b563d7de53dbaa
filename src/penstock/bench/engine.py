"""`penstock bench engine`: the workloads of one device, on the engine in process, with weights of a given shape.

All requests are handed over at once; greedy, end-of-sequence ignored, random token ids that are new in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.offline import run_offline
from penstock.bench.roofline import EngineWorkload, Roofline
from penstock.core.clock import MonotonicClock
from penstock.core.errors import ConfigError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.sched.plan import Runner
from penstock.sched.scheduler import Scheduler
from penstock.workload.trace import read_trace

TRACE_REQUESTS, TRACE_PROMPT, TRACE_OUTPUT = 1000, 7000, 1000  # W3: how much of the trace, cut to what


@dataclass(frozen=True)
class Round:
    seconds: float
    steps: int
    device_idle: float | None  # share of the time in which the device waited for the host; None: not known


@dataclass(frozen=True)
class ParkRound:
    """A park, a wake and a first token."""

    park_s: dict[str, float]  # phase by phase
    given_back_bytes: int  # as the driver or the system counts them
    wake_s: dict[str, float]
    first_token_s: float  # after the wake
    is_equal: bool  # tokens and log probabilities are those of before, to the bit

    @property
    def park_total_s(self) -> float:
        return sum(self.park_s.values())

    @property
    def wake_total_s(self) -> float:
        """Seconds, the first token included."""
        return sum(self.wake_s.values()) + self.first_token_s


@dataclass(frozen=True)
class EngineFigure:
    """One workload: all its rounds, and what the best of them comes to."""

    workload: str
    rounds: list[Round]
    seconds: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    steps: int
    device_idle: float | None
    mbu: float | None  # see roofline; None: nobody has measured this device
    mfu: float | None


@dataclass(frozen=True)
class EngineReport:
    """All that a table of figures needs beside it."""

    command: str
    date: str
    shape: str
    device: str
    versions: dict[str, str]
    number_format: str
    quant: str
    kv_dtype: str
    max_num_seqs: int
    chunk_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    weight_bytes: int | None  # read in every step
    startup_s: dict[str, float]  # phase by phase
    figures: list[EngineFigure]
    parks: list[ParkRound] = field(default_factory=list)


def workload(name: str, trace: Path | None) -> EngineWorkload:
    match name:
        case "W1":
            return EngineWorkload(name, [(128, 256)])
        case "W1b":
            return EngineWorkload(name, [(128, 256)] * 8)
        case "W2":
            return EngineWorkload(name, [(512, 256)] * 256)
        case "W3":
            return EngineWorkload(name, _trace_lengths(trace))
        case "W4":
            return EngineWorkload(name, [(2176, 64)] * 256, shared=2048)
        case "W6":
            return EngineWorkload(name, [(4096, 1)] * 32)
    raise ConfigError(f"no workload {name!r}; there are W1, W1b, W2, W3, W4, W6", param="workload")


def make_requests(work: EngineWorkload, vocab_size: int, seed: int) -> list[Request]:
    source = random.Random(f"{work.name} {seed}")
    shared = source.choices(range(vocab_size), k=work.shared)
    return [
        Request(
            id=f"{work.name}-{seed}-{i}",
            prompt_ids=shared + source.choices(range(vocab_size), k=prompt - work.shared),
            max_tokens=output,
            sampling=SamplingParams(temperature=0.0),
        )
        for i, (prompt, output) in enumerate(work.lengths)
    ]


def run_round(
    work: EngineWorkload,
    seed: int,
    *,
    vocab_size: int,
    scheduler: Scheduler,
    runner: Runner,
    busy_s: Callable[[], float] | None,
) -> Round:
    """`busy_s` says how long the device has worked so far, where that is known."""
    requests = make_requests(work, vocab_size, seed)
    before_s = busy_s() if busy_s else 0.0
    run = run_offline(requests, scheduler, runner, MonotonicClock())
    assert run.num_output_tokens == work.output_tokens, "tokens are missing"
    idle = 1 - (busy_s() - before_s) / run.seconds if busy_s else None
    return Round(run.seconds, len(run.steps), idle)


def figure(work: EngineWorkload, rounds: list[Round], roofline: Roofline | None) -> EngineFigure:
    best = min(rounds, key=lambda each: each.seconds)
    return EngineFigure(
        workload=work.name,
        rounds=rounds,
        seconds=best.seconds,
        output_tokens_per_s=work.output_tokens / best.seconds,
        prompt_tokens_per_s=work.prompt_tokens / best.seconds,
        steps=best.steps,
        device_idle=best.device_idle,
        mbu=roofline.mbu(work, best.steps, best.seconds) if roofline else None,
        mfu=roofline.mfu(work, best.seconds) if roofline else None,
    )


def _trace_lengths(trace: Path | None) -> list[tuple[int, int]]:
    if trace is None:
        raise ConfigError("W3 needs --trace: the Azure conversation trace, as CSV", param="trace")
    arrivals = read_trace(trace, count=TRACE_REQUESTS)
    return [(min(one.prompt_tokens, TRACE_PROMPT), min(one.output_tokens, TRACE_OUTPUT)) for one in arrivals]
