"""`penstock bench engine`: puts the engine together with random weights, runs the workloads, prints a table."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import msgspec
import torch

from penstock.bench.engine import DEVICES, EngineFigure, measure, workload
from penstock.bench.shapes import shape
from penstock.core.settings import EngineSettings
from penstock.kv.cache import KVCache
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler

WARM_UP = "W1b"


def bench_engine(arguments: argparse.Namespace) -> None:
    started_s = time.monotonic()
    config = shape(arguments.shape)
    workloads = [workload(name, arguments.trace) for name in arguments.workload.split(",")]
    assembly = assemble(RandomCheckpoint(config), EngineSettings(dtype=arguments.dtype), lambda *_: None)
    startup_s = time.monotonic() - started_s
    print(
        f"{arguments.shape}, {assembly.device}, {assembly.kernels} kernels, {assembly.number_format}: {startup_s:.1f} s"
    )
    width = getattr(torch, assembly.number_format).itemsize
    device = DEVICES.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    figures = []
    for work in [replace(workload(WARM_UP, None), name="warm-up"), *workloads]:
        figure = measure(
            work,
            config,
            lambda: make_scheduler(assembly),
            assembly.runner,
            rounds=1 if work.name == "warm-up" else arguments.rounds,
            weight_bytes=width * config.num_parameters,
            kv_bytes_per_token=config.kv_bytes_per_token(width),
            device=device,
            busy_s=getattr(assembly.runner, "busy_s", None),
        )
        figures.append(figure)
        _print(figure)
    if arguments.json:
        report = {"shape": arguments.shape, "startup_s": startup_s, "figures": figures[1:]}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def make_scheduler(assembly: Assembly) -> Scheduler:
    """A cache that holds nothing yet: every round starts cold."""
    budget = StepBudget(assembly.chunk_tokens, target_s=None, floor=assembly.block_size)
    return Scheduler(KVCache(assembly.num_blocks, assembly.block_size), budget, max_num_seqs=assembly.max_num_seqs)


def _print(figure: EngineFigure) -> None:
    shares = {"MBU": figure.mbu, "MFU": figure.mfu, "device idle": figure.device_idle}
    known = "".join(f"  {name} {share:5.1%}" for name, share in shares.items() if share is not None)
    print(
        f"{figure.workload:8} {figure.seconds:8.3f} s  {figure.output_tokens_per_s:9,.0f} out/s  "
        f"{figure.prompt_tokens_per_s:9,.0f} prompt/s  {figure.steps:5} steps{known}",
        flush=True,
    )
