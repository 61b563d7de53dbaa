"""The cost of adapters: decode steps of a model with none, one and many of them in a batch, side by side.

    python -m tools.lora smollm2 --batch 16 --adapters 1 4 16
    python -m tools.lora --shape llama8b --batch 1 8 50 64 --targets all attention --context 1000

Weights of a shape and adapters are random. Steps follow each other as in the engine: on a GPU the next is launched
before the tokens of one are read. Steps with and without take turns, so what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from tests.model.lora import ATTENTION, EVERY_LINEAR, write_adapter

from penstock.bench.shapes import shape
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.peft import read_peft
from penstock.hub.resolve import resolve
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.plan import SampleSpec, Slice, StepPlan

TARGETS = {"all": EVERY_LINEAR, "attention": ATTENTION}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lora", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--shape", help="random weights of this shape, in place of a model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="sequences that decode")
    parser.add_argument("--adapters", type=int, nargs="+", help="auto: one, and as many as there are sequences")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["all"], help="the linear layers they adapt")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--threads", type=int, help="one measures best on a machine that others use")
    arguments = parser.parse_args()
    most = max(arguments.adapters or arguments.batch)
    settings = EngineSettings(
        max_loras=most,
        max_lora_rank=arguments.rank,
        max_model_len=arguments.context,
        dtype=arguments.dtype,
        max_num_seqs=max(arguments.batch),
        threads=arguments.threads,
        quant=arguments.quant,
        load="dummy" if arguments.shape else "auto",
    )
    checkpoint: Checkpoint
    checkpoint = RandomCheckpoint(shape(arguments.shape)) if arguments.shape else resolve(arguments.model)  # type: ignore[assignment]
    begun_s = time.perf_counter()
    assembly = assemble(checkpoint, settings, lambda name, done, total: None)
    formats = (
        f"{assembly.formats.number_format}, {assembly.formats.quant}; start-up {time.perf_counter() - begun_s:.1f} s"
    )
    print(f"{arguments.shape or arguments.model}, {formats}; rank {arguments.rank}, contexts of {arguments.context}")
    fill(assembly)
    for targets in arguments.targets:
        place(assembly, checkpoint, arguments.rank, targets, most)
        for batch in arguments.batch:
            for count in sorted({min(each, batch) for each in arguments.adapters or (1, batch)}):
                base = decodes(assembly, batch, arguments.context)
                adapted = decodes(assembly, batch, arguments.context, num_adapters=count)
                base_s, adapted_s = side_by_side(assembly, base, adapted, arguments.rounds)
                print(
                    f"{targets:9} batch {batch:3}, {count:3} adapters: {1e3 * adapted_s:7.2f} ms a step, without "
                    f"{1e3 * base_s:7.2f}: {adapted_s / base_s:.3f} times"
                )


def place(assembly: Assembly, checkpoint: Checkpoint, rank: int, targets: str, count: int) -> None:
    """Puts adapters into every slot. A GPU has a copy in each: there one adapter stands for all."""
    assert assembly.adapters is not None, "this engine runs no adapters"
    digests = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(1 if assembly.formats.kernels == "triton" else count):
            path = write_adapter(
                Path(directory) / "a",
                checkpoint.config,
                seed=seed,
                rank=rank,
                lora_alpha=0.05,
                dtype="bfloat16",
                targets=TARGETS[targets],
            )
            found = assembly.adapters.read(str(path), read_peft(path).digest)
            assembly.adapters.keep(found)
            digests.append(found.digest)
    wait(assembly)
    begun_s = time.perf_counter()
    assembly.adapters.place([(slot, digests[slot % len(digests)]) for slot in range(count)])
    wait(assembly)
    placed_s = (time.perf_counter() - begun_s) / count
    print(f"{targets}: an adapter has {found.num_bytes / 1e6:.1f} MB and is on the device in {1e3 * placed_s:.2f} ms")


def fill(assembly: Assembly) -> None:
    """Fills caches of a GPU with random numbers: nothing is timed on zeros."""
    if assembly.formats.kernels == "triton":
        for layer in assembly.runner._kv:  # type: ignore[attr-defined]
            for cache in (layer.keys, layer.values):
                cache[: min(len(cache), 4096)].normal_()


def wait(assembly: Assembly) -> None:
    if assembly.device.name.startswith("cuda"):
        torch.cuda.synchronize()


def decodes(assembly: Assembly, batch: int, context: int, num_adapters: int = 0) -> StepPlan:
    """Each in blocks of its own. Greedy: what choosing a token costs otherwise depends on what there is to choose from,
    and that on the adapter."""
    sample = SampleSpec(SamplingParams(temperature=0.0), history=[0, 0], prompt_len=1, position=2)
    width = -(-context // assembly.limits.block_size)
    first = batch * width if num_adapters else 0  # what one kind of step leaves there is not for the other to read
    assert first + batch * width <= assembly.size.num_blocks, "the cache is too small"
    slices = [
        Slice(f"{i}", context - 1, 1, [i], range(first + i * width, first + (i + 1) * width), sample, 0)
        for i in range(batch)
    ]
    if not num_adapters:
        return StepPlan(slices)
    return StepPlan([msgspec.structs.replace(each, slot=i % num_adapters) for i, each in enumerate(slices)])


def side_by_side(assembly: Assembly, plain: StepPlan, adapted: StepPlan, rounds: int) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    burst = 10 if assembly.runner.overlaps else 1
    for _ in range(rounds // burst + 2):
        for found, plan in zip(times, (plain, adapted), strict=True):
            found.append(step_s(assembly, plan, burst))
    return statistics.median(times[0]), statistics.median(times[1])


def step_s(assembly: Assembly, plan: StepPlan, count: int) -> float:
    begun_s = time.perf_counter()
    before = assembly.runner.submit(plan)
    for _ in range(count - 1):
        handle = assembly.runner.submit(plan)
        before.result()
        before = handle
    before.result()
    return (time.perf_counter() - begun_s) / count


if __name__ == "__main__":
    main()
