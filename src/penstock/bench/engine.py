"""`penstock bench engine`: the workloads of one device, on the engine in process, with weights of a given shape.

All requests are handed over at once; greedy, end-of-sequence ignored, random token ids that are new in every run.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.offline import OfflineRun, run_offline
from penstock.core.clock import MonotonicClock
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.sched.plan import Runner
from penstock.sched.scheduler import Scheduler

TRACE_REQUESTS, TRACE_PROMPT, TRACE_OUTPUT = 1000, 7000, 1000  # W3: how much of the trace, cut to what


@dataclass(frozen=True)
class EngineWorkload:
    name: str
    lengths: list[tuple[int, int]]  # (prompt, output) tokens of each request
    shared: int = 0  # of each prompt, tokens that all begin with


@dataclass(frozen=True)
class Device:
    """What the device can do: the roof over every figure."""

    name: str
    read_bytes_per_s: float
    flops_per_s: float


# By the name the driver gives it. Measured: memory read; bf16 matrix product of 8192³.
DEVICES = {device.name: device for device in (Device("NVIDIA H200", 4.41e12, 765e12),)}


@dataclass(frozen=True)
class EngineFigure:
    workload: str
    seconds: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    steps: int
    mbu: float | None  # bytes that had to be read, over the time, as a share of the device's bandwidth
    mfu: float | None  # operations that had to be done, likewise; None: nobody has measured this device
    device_idle: float | None  # share of the time in which the device waited for the host


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


def measure(
    work: EngineWorkload,
    config: ModelConfig,
    make_scheduler: Callable[[], Scheduler],
    runner: Runner,
    *,
    rounds: int,
    weight_bytes: float,
    kv_bytes_per_token: float,
    device: Device | None,
    busy_s: Callable[[], float] | None,
) -> EngineFigure:
    """The best of some rounds."""
    figures = []
    for seed in range(rounds):
        requests = make_requests(work, config.vocab_size, seed)
        before_s = busy_s() if busy_s else 0.0
        run = run_offline(requests, make_scheduler(), runner, MonotonicClock())
        idle = 1 - (busy_s() - before_s) / run.seconds if busy_s else None
        figures.append(_figure(work, config, run, weight_bytes, kv_bytes_per_token, device, idle))
    return min(figures, key=lambda figure: figure.seconds)


def _figure(
    work: EngineWorkload,
    config: ModelConfig,
    run: OfflineRun,
    weight_bytes: float,
    kv_bytes_per_token: float,
    device: Device | None,
    idle: float | None,
) -> EngineFigure:
    prompt = sum(prompt for prompt, _ in work.lengths)
    output = run.num_output_tokens
    assert output == sum(output for _, output in work.lengths), "tokens are missing"
    # Every step reads the weights once; every decode reads its context, the shared part once for all.
    context = sum((p - work.shared) * o + o * o / 2 for p, o in work.lengths) + work.shared * work.lengths[0][1]
    read = len(run.steps) * weight_bytes + context * kv_bytes_per_token
    computed = prompt - (len(work.lengths) - 1) * work.shared + output
    flops = 2 * config.num_parameters * computed
    return EngineFigure(
        workload=work.name,
        seconds=run.seconds,
        output_tokens_per_s=output / run.seconds,
        prompt_tokens_per_s=prompt / run.seconds,
        steps=len(run.steps),
        mbu=read / run.seconds / device.read_bytes_per_s if device else None,
        mfu=flops / run.seconds / device.flops_per_s if device else None,
        device_idle=idle,
    )


def _trace_lengths(trace: Path | None) -> list[tuple[int, int]]:
    if trace is None:
        raise ConfigError("W3 needs --trace: the Azure conversation trace, as CSV", param="trace")
    with trace.open() as file:
        rows = list(csv.DictReader(file))[:TRACE_REQUESTS]
    return [
        (min(int(row["ContextTokens"]), TRACE_PROMPT), min(int(row["GeneratedTokens"]), TRACE_OUTPUT)) for row in rows
    ]
