"""Steps of a model on one process with all cores and on ranks that share them out, in turns: `python -m tools.ranks`.

Random weights of SmolLM2's shape, in 4 bits; decodes of a context of 1,024 tokens. Ratios are of medians: above 1 ranks
are faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import msgspec
import torch

from penstock.core.cores import usable_cores
from penstock.core.model_config import ModelConfig
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from penstock.runner.profile import decode_step
from penstock.runner.ranks.assemble import assemble_ranks
from penstock.sched.plan import SampleSpec, StepPlan

CONTEXT = 1024  # tokens of each sequence, as `decode_step` has them
SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    tied_embeddings=True,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.ranks", description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quant", default="int4", choices=["none", "int8", "int4"])
    arguments = parser.parse_args()
    cores = usable_cores()
    one = made(1, cores, arguments.quant)
    many = made(arguments.tp, max(1, cores // arguments.tp), arguments.quant)
    print(f"{cores} cores: one process of {cores} threads, and {arguments.tp} ranks of {max(1, cores // arguments.tp)}")
    for count in (1, 8, 32):
        alone, ranks = in_turns(step(one, count), step(many, count), arguments.rounds)
        print(
            f"decode {count:3}: {alone * 1e3:7.2f} ms, ranks {ranks * 1e3:7.2f} ms, {alone / ranks:.2f} times as fast"
        )


def made(tp: int, threads: int, quant: str) -> Assembly:
    settings = EngineSettings(device="cpu", load="dummy", tp=tp, threads=threads, quant=quant)  # type: ignore[arg-type]
    return assemble_ranks(RandomCheckpoint(SMOLLM2), SMOLLM2, settings, lambda *_: None)


def step(assembly: Assembly, count: int) -> Callable[[], float]:
    plan = greedy(decode_step(count, assembly.limits))

    def run() -> float:
        began_s = time.perf_counter()
        assembly.runner.submit(plan).result()
        return time.perf_counter() - began_s

    return run


def greedy(plan: StepPlan) -> StepPlan:
    """The same step, whose tokens cost next to nothing to choose."""
    spec = SampleSpec(SamplingParams(temperature=0.0), history=[], prompt_len=1, position=CONTEXT)
    return StepPlan([msgspec.structs.replace(each, sample=spec) for each in plan.slices])


def in_turns(one: Callable[[], float], other: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Medians."""
    for _ in range(5):
        one(), other()
    both = [(one(), other()) for _ in range(rounds)]
    first, second = zip(*both, strict=True)
    return statistics.median(first), statistics.median(second)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
