"""What adapters cost: steps of a real model with none, one and many of them in a batch, side by side.

`python -m tools.lora [MODEL] [--rank R] [--batch N] [--adapters N ...]`. Adapters are random and adapt every linear
layer. Steps with and without take turns, so what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
from tests.model.lora import write_adapter

from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.resolve import resolve
from penstock.runner.assemble import Assembly, assemble
from penstock.runner.profile import Limits, decode_step
from penstock.sched.plan import SampleSpec, StepPlan


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lora", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="sequences that decode")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="one measures best on a machine that others use")
    arguments = parser.parse_args()
    most = max(arguments.adapters)
    settings = EngineSettings(
        max_loras=most, max_model_len=256, dtype=arguments.dtype, max_num_seqs=arguments.batch,
        threads=arguments.threads,
    )  # fmt: skip
    checkpoint = resolve(arguments.model)
    assembly = assemble(checkpoint, settings, lambda name, done, total: None)
    assert assembly.adapters is not None, "this engine runs no adapters"
    digests = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(most):
            path = write_adapter(
                Path(directory) / "a",
                checkpoint.config,
                seed=seed,
                rank=arguments.rank,
                lora_alpha=0.05,
                dtype="bfloat16",
            )
            found = assembly.adapters.read(str(path), digest_of(path))
            assembly.adapters.keep(found)
            digests.append(found.digest)
    begun_s = time.perf_counter()
    assembly.adapters.place(list(enumerate(digests)))
    placed_s = (time.perf_counter() - begun_s) / most
    formats = f"{assembly.number_format}, {assembly.quant}"
    print(f"{arguments.model}, {formats}; rank {arguments.rank}, a batch of {arguments.batch}")
    print(f"an adapter is put onto the device in {1e3 * placed_s:.1f} ms")
    limits = Limits(assembly.block_size, assembly.max_num_seqs, assembly.chunk_tokens, assembly.max_model_len)
    plain = greedy(decode_step(arguments.batch, limits))
    for count in arguments.adapters:
        base_s, adapted_s = side_by_side(assembly, plain, with_slots(plain, count), arguments.rounds)
        print(
            f"{count:3} adapters: {1e3 * adapted_s:7.2f} ms a step, without {1e3 * base_s:7.2f}: "
            f"{adapted_s / base_s:.2f} times"
        )


def digest_of(path: Path) -> str:
    from penstock.hub.peft import read_peft

    return read_peft(path).digest


def greedy(plan: StepPlan) -> StepPlan:
    """What choosing a token costs depends on what there is to choose from, and that on the adapter."""
    sample = SampleSpec(SamplingParams(temperature=0.0), history=[0, 0], prompt_len=1, position=2)
    return StepPlan([msgspec.structs.replace(each, sample=sample) for each in plan.slices])


def with_slots(plan: StepPlan, count: int) -> StepPlan:
    """In another block of the cache: what one kind of step leaves there is not for the other to read."""
    slices = [
        msgspec.structs.replace(each, slot=place % count, block_ids=[1] * len(each.block_ids))
        for place, each in enumerate(plan.slices)
    ]
    return StepPlan(slices)


def side_by_side(assembly: Assembly, plain: StepPlan, adapted: StepPlan, rounds: int) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for found, plan in zip(times, (plain, adapted), strict=True):
            begun_s = time.perf_counter()
            assembly.runner.submit(plan).result()
            found.append(time.perf_counter() - begun_s)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
