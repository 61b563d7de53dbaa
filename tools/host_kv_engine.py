"""Host memory behind an engine of a known shape, in process and with random weights: see `tools.host_kv --shape`.

What a copy takes against what the bus allows, what it takes from the steps beside it, and what it saves: for a prompt
that comes again when the device has lost it, and for sequences that had to give way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import mean, median

import torch

from penstock.bench.offline import OfflineRun, run_offline
from penstock.bench.shapes import shape
from penstock.core.clock import MonotonicClock
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.kv.cache import KVCache
from penstock.kv.host import HostBlocks
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.runner.moving import BlockMover
from penstock.sched.budget import StepBudget
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from penstock.sched.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0)
CONTEXT = 1024  # of the sequences whose steps are timed
STEPS = 30


@dataclass
class Engine:
    made: Assembly
    vocab_size: int
    rng: random.Random

    @property
    def block_bytes(self) -> int:
        return self.made.size.kv_bytes // self.made.size.num_blocks

    @property
    def mover(self) -> BlockMover:
        return self.made.runner._mover  # type: ignore[attr-defined,no-any-return]

    def scheduler(self, num_tokens: int, *, has_host: bool) -> Scheduler:
        """Returns a scheduler with room for so many tokens on the device, of all that it has."""
        made = self.made
        cache = KVCache(min(num_tokens // made.limits.block_size, made.size.num_blocks), made.limits.block_size)
        if has_host:
            cache.pool.host = HostBlocks(
                made.size.host_blocks, made.size.num_blocks, block_size=made.limits.block_size, copy_s=made.copy_s
            )
        budget = StepBudget(made.limits.chunk_tokens, target_s=None, floor=made.limits.block_size)
        return Scheduler(cache, budget, max_num_seqs=made.limits.max_num_seqs)

    def run(self, scheduler: Scheduler, requests: list[Request]) -> OfflineRun:
        return run_offline(requests, scheduler, self.made.runner, MonotonicClock())

    def prompt(self, num_tokens: int) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=num_tokens)


def start(name: str, host_gib: float | None, memory_fraction: float | None) -> Engine:
    began_s, phases = time.monotonic(), []

    def phase(named: str, done: int, _total: int) -> None:
        if not done:
            phases.append((named, time.monotonic() - began_s))

    settings = EngineSettings(host_kv_gib=host_gib, memory_fraction=memory_fraction)
    config = shape(name)
    made = assemble(RandomCheckpoint(config), settings, phase)
    print(f"{name} on {made.device.driver_name or made.device.name}, started in {time.monotonic() - began_s:.1f} s")
    print("  " + ", ".join(f"{named} at {at_s:.1f}" for named, at_s in phases))
    print(
        f"  blocks of {made.limits.block_size} tokens: {made.size.num_blocks} on the device, "
        f"{made.size.host_blocks} on the host"
    )
    if made.size.host_blocks:
        print(f"  a block there and back takes {made.copy_s * 1e6:.0f} µs")
    return Engine(made, config.vocab_size, random.Random(1))


# -- copies


def copies(engine: Engine) -> None:
    host, made = engine.mover._host, engine.made
    assert host is not None
    count = min(64, made.size.num_blocks, made.size.host_blocks)
    scattered = engine.rng.sample(range(made.size.host_blocks), count)
    print(f"\n{count} blocks of {engine.block_bytes / 1024:.0f} KiB, GB/s")
    for name, copy, turned in (("to the host", host.save, False), ("to the device", host.load, True)):
        for there, how in ((list(range(count)), "in one piece"), (scattered, "scattered")):
            pairs = [(b, a) if turned else (a, b) for a, b in enumerate(there)]
            told(f"{name}, {how}", count * engine.block_bytes / 1e9 / best_s(partial(copy, pairs), host.wait))
    if torch.device(made.device.name).type == "cuda":
        bus(engine)


def bus(engine: Engine) -> None:
    """Tells what one large copy of pinned memory reaches."""
    there = torch.empty(512 << 20, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device=engine.made.device.name)
    for name, target, source in (("to the host", there, here), ("to the device", here, there)):
        copy = partial(target.copy_, source, non_blocking=True)
        told(f"the bus {name}, 512 MiB", there.numel() / 1e9 / best_s(copy, torch.cuda.synchronize))


def told(name: str, *values: object) -> None:
    cells = (f"{value:10.2f}" if isinstance(value, float) else f"{value:>10}" for value in values)
    print(f"  {name:42}{' '.join(cells)}", flush=True)


def best_s(do: Callable[[], object], wait: Callable[[], object], rounds: int = 5) -> float:
    taken = []
    for _ in range(rounds):
        wait()
        began_s = time.perf_counter()
        do()
        wait()
        taken.append(time.perf_counter() - began_s)
    return min(taken)


# -- steps beside them


def steps(engine: Engine, num_decodes: int = 64) -> None:
    made = engine.made
    first_free = num_decodes * (CONTEXT // made.limits.block_size)
    most = min(made.size.num_blocks - first_free, made.size.host_blocks)
    print(f"\na step of {num_decodes} decodes of {CONTEXT} tokens, ms")
    told("", "alone", "saving", "loading")
    for count in (1, 4, 16, 64):
        if count <= most:
            saved = [(first_free + i, made.size.num_blocks + i) for i in range(count)]
            plans = [], saved, [(there, here) for here, there in saved]
            taken = [step_s(engine, num_decodes, pairs) * 1e3 for pairs in plans]
            told(f"with {count} blocks, {count * engine.block_bytes / 1e6:.0f} MB", *taken)


def step_s(engine: Engine, num_decodes: int, pairs: list[tuple[int, int]]) -> float:
    """The median time from one result to the next, with one step ahead if the device allows it."""
    runner, size = engine.made.runner, engine.made.limits.block_size
    per_sequence = CONTEXT // size
    spec = SampleSpec(GREEDY, [0], 1, CONTEXT)
    slices = [
        Slice(f"s{i}", CONTEXT - 1, 1, [i], list(range(i * per_sequence, (i + 1) * per_sequence)), spec, 0)
        for i in range(num_decodes)
    ]
    told_s, ahead = [], runner.submit(StepPlan(slices, pairs))
    for _ in range(STEPS):
        handle = runner.submit(StepPlan(slices, pairs))
        ahead.result()
        ahead = handle
        told_s.append(time.perf_counter())
    ahead.result()
    return median(after - before for before, after in pairwise(told_s))


# -- what they save


def again(engine: Engine, num_prompts: int, num_tokens: int) -> None:
    prompts = [engine.prompt(num_tokens) for _ in range(num_prompts)]
    room = (num_prompts // 2) * (num_tokens + engine.made.limits.block_size)
    print(f"\n{num_prompts} prompts of {num_tokens} tokens, room for half; ms to the first token")
    told("", "first time", "again", "at once", "from host")
    for name, has_host in (("device alone", False), ("with host memory", True)):
        scheduler = engine.scheduler(room, has_host=has_host)
        first, later = ([first_token_s(engine, scheduler, prompt) for prompt in prompts] for _ in range(2))
        cached = [first_token_s(engine, scheduler, prompts[-1]) for _ in range(3)]
        milliseconds = (1e3 * seconds for seconds in (mean(first), mean(later), min(cached)))
        told(name, *milliseconds, scheduler.cache.loaded_tokens)


def first_token_s(engine: Engine, scheduler: Scheduler, prompt: Sequence[int]) -> float:
    return engine.run(scheduler, [Request(f"p{engine.rng.random()}", list(prompt), 1, sampling=GREEDY)]).seconds


def pressure(engine: Engine, num_requests: int, prompt: int, output: int) -> None:
    """All at once, with room for a bit more than half of what they come to."""
    prompts = [engine.prompt(prompt) for _ in range(num_requests)]
    room = int(0.55 * num_requests * (prompt + output))
    print(f"\n{num_requests} requests of {prompt} + {output} tokens at once, room for {room}")
    told("", "seconds", "preempted", "recomputed", "from host")
    for name, has_host in (("recompute", False), ("host memory", True)):
        requests = [Request(f"r{i}", ids, output, sampling=GREEDY) for i, ids in enumerate(prompts)]
        scheduler = engine.scheduler(room, has_host=has_host)
        done = engine.run(scheduler, requests)
        counters = scheduler.counters
        told(name, done.seconds, counters.preemptions, counters.recomputed_tokens, scheduler.cache.loaded_tokens)
        assert done.num_output_tokens == num_requests * output


def measure(name: str, host_gib: float, memory_fraction: float | None, num_prompts: int, num_tokens: int) -> None:
    engine = start(name, host_gib, memory_fraction)
    copies(engine)
    steps(engine)
    again(engine, num_prompts, num_tokens)
    pressure(engine, 32, 512, 384)
