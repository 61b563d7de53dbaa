"""`penstock bench engine`: puts the engine together with random weights, runs the workloads, prints a table."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.bench.engine import EngineFigure, EngineReport, Round, figure, run_round, workload
from penstock.bench.roofline import EngineWorkload, Roofline
from penstock.bench.shapes import shape
from penstock.capacity.hardware import by_driver_name
from penstock.cli.flags import section_from
from penstock.core.config import build
from penstock.core.files import check_outputs, write_json
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.engine_process.phases import Phases
from penstock.kv.cache import KVCache
from penstock.kv.states import StateSlots
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.runner.assemble import Assembly

WARM_UP = "W1b"


def bench_engine(arguments: argparse.Namespace) -> None:
    check_outputs(arguments.json)
    config = shape(arguments.shape, arguments.layers)
    workloads = [workload(name, arguments.trace) for name in arguments.workload.split(",")]
    settings = build(EngineSettings, section_from(arguments, "engine"), where="engine.")
    if arguments.park:
        settings = replace(settings, parkable=True)
    assembly, startup_s = _assemble(config, settings)
    device = _device_name(assembly)
    roofline = _roofline(config, assembly, device)
    report = EngineReport(
        command=f"penstock {shlex.join(sys.argv[1:])}",
        date=datetime.date.today().isoformat(),
        shape=f"{arguments.shape}, {arguments.layers} layers" if arguments.layers else arguments.shape,
        device=device,
        versions=_versions(),
        number_format=assembly.formats.number_format,
        quant=assembly.formats.quant,
        kv_dtype=assembly.formats.kv_dtype,
        max_num_seqs=assembly.limits.max_num_seqs,
        chunk_tokens=assembly.limits.chunk_tokens,
        block_size=assembly.limits.block_size,
        num_blocks=assembly.size.num_blocks,
        kv_bytes=assembly.size.kv_bytes,
        weight_bytes=roofline.weight_bytes if roofline else None,
        startup_s=startup_s,
        figures=[],
    )
    _print_head(report, assembly.formats.kernels)
    _run(replace(workload(WARM_UP, None), name="warm-up"), config, assembly, num_rounds=1)
    if arguments.park:
        _park(arguments.park, config, assembly, report)
        if arguments.json:
            write_json(arguments.json, report)
        return
    for work in workloads:
        rounds = _run(work, config, assembly, num_rounds=arguments.rounds)
        report.figures.append(figure(work, rounds, roofline))
        _print_figure(report.figures[-1])
        if arguments.json:  # after each: a run that is cut off has left what it found
            write_json(arguments.json, report)


def _run(work: EngineWorkload, config: ModelConfig, assembly: Assembly, *, num_rounds: int) -> list[Round]:
    return [
        run_round(
            work,
            seed,
            vocab_size=config.vocab_size,
            scheduler=make_scheduler(assembly),
            runner=assembly.runner,
            busy_s=getattr(assembly.runner, "busy_s", None),
        )
        for seed in range(num_rounds)
    ]


def _park(num_rounds: int, config: ModelConfig, assembly: Assembly, report: EngineReport) -> None:
    from penstock.bench.park import ParkBench, line

    assert assembly.memory is not None
    bench = ParkBench(assembly.memory, assembly.runner, lambda: make_scheduler(assembly), config.vocab_size)
    for number in range(1, num_rounds + 1):
        report.parks.append(bench.round())
        print(line(number, report.parks[-1]), flush=True)


def _assemble(config: ModelConfig, settings: EngineSettings) -> tuple[Assembly, dict[str, float]]:
    phases = Phases("import", lambda name, done, total: None)
    from penstock.model.random_weights import RandomCheckpoint
    from penstock.runner.ranks.assemble import assemble_ranks

    assembly = assemble_ranks(RandomCheckpoint(config), config, settings, phases)
    phases.close()
    return assembly, phases.seconds


def make_scheduler(assembly: Assembly) -> Scheduler:
    """A cache that holds nothing yet: every round starts cold."""
    budget = StepBudget(assembly.limits.chunk_tokens, target_s=None, floor=assembly.limits.block_size)
    return Scheduler(
        KVCache(
            assembly.size.num_blocks,
            assembly.limits.block_size,
            states=StateSlots(assembly.limits.max_num_seqs, assembly.limits.state_snapshots)
            if assembly.state_bytes
            else None,
        ),
        budget,
        max_num_seqs=assembly.limits.max_num_seqs,
        num_batches=assembly.parallelism.pp,
    )


def _device_name(assembly: Assembly) -> str:
    import torch

    from penstock.bench.machine import cpu_name

    return torch.cuda.get_device_name() if assembly.device.name.startswith("cuda") else cpu_name()


def _roofline(config: ModelConfig, assembly: Assembly, device: str) -> Roofline | None:
    gpu = by_driver_name(device)
    if gpu is None or gpu.measured is None:
        return None
    return Roofline(
        config, assembly.formats.number_format, assembly.formats.quant, assembly.formats.kv_dtype, gpu.measured
    )


def _versions() -> dict[str, str]:
    versions = {"penstock": __version__, "Python": platform.python_version()}
    for name in ("torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _print_head(report: EngineReport, kernels: str) -> None:
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.startup_s.items())
    print(
        f"{report.shape} on {report.device}: {kernels} kernels, {report.number_format}, quant {report.quant}, "
        f"KV {report.kv_dtype}, {report.num_blocks * report.block_size:,} tokens in {report.kv_bytes / 2**30:.1f} GiB\n"
        f"ready in {sum(report.startup_s.values()):.1f} s: {phases}",
        flush=True,
    )


def _print_figure(figure: EngineFigure) -> None:
    shares = {"MBU": figure.mbu, "MFU": figure.mfu, "idle": figure.device_idle}
    known = "".join(f"  {name} {share:5.1%}" for name, share in shares.items() if share is not None)
    print(
        f"{figure.workload:8} {figure.seconds:7.2f} s {figure.output_tokens_per_s:8,.0f} out/s "
        f"{figure.prompt_tokens_per_s:9,.0f} prompt/s {figure.steps:5} steps{known}",
        flush=True,
    )
