"""A GPU never runs out of memory: the most that can be asked, within a share of the device. Skipped without a GPU."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch

from penstock.bench.offline import OfflineRun, run_offline
from penstock.bench.shapes import SHAPES
from penstock.core.clock import MonotonicClock
from penstock.core.request import FinishReason, Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.kv.cache import KVCache
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from tests.devices import NEEDS_GPU

pytestmark = NEEDS_GPU

CONFIG = SHAPES["llama1b"]
FRACTION = 0.3
SLACK_BYTES = 256 << 20
DEAR = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, num_logprobs=20)


@pytest.fixture(scope="module")
def engine() -> Assembly:
    gc.collect()
    torch.cuda.empty_cache()  # what other tests left
    torch.cuda.reset_peak_memory_stats()
    return assemble(RandomCheckpoint(CONFIG), EngineSettings(memory_fraction=FRACTION), lambda *_: None)


@pytest.fixture(autouse=True)
def stays_within_its_share(engine: Assembly) -> Iterator[None]:
    ooms = torch.cuda.memory_stats()["num_ooms"]
    yield
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.memory_stats()["num_ooms"] == ooms
    assert torch.cuda.max_memory_reserved() <= FRACTION * total + SLACK_BYTES


def request(index: int, prompt: int, output: int, sampling: SamplingParams) -> Request:
    return Request(f"r{index}", random.Random(index).choices(range(CONFIG.vocab_size), k=prompt), output, sampling)


def run(engine: Assembly, requests: list[Request], num_blocks: int | None = None) -> tuple[OfflineRun, Scheduler]:
    """All of them finish, with all their tokens."""
    budget = StepBudget(engine.limits.chunk_tokens, target_s=None, floor=engine.limits.block_size)
    cache = KVCache(num_blocks or engine.size.num_blocks, engine.limits.block_size)
    scheduler = Scheduler(cache, budget, max_num_seqs=engine.limits.max_num_seqs)
    found = run_offline(requests, scheduler, engine.runner, MonotonicClock())
    finished = [event.finish for event in found.events if event.finish]
    assert finished == [FinishReason.LENGTH] * len(requests)
    assert found.num_output_tokens == sum(each.max_tokens for each in requests)
    assert cache.pool.num_free == cache.pool.num_blocks
    return found, scheduler


def test_a_cache_takes_most_of_the_share_that_weights_leave(engine: Assembly) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    weights = 2 * CONFIG.num_parameters
    assert engine.formats.kernels == "triton"
    assert 0.7 * (FRACTION * total - weights) < engine.size.kv_bytes < FRACTION * total - weights


def test_a_prompt_as_long_as_the_context(engine: Assembly) -> None:
    run(engine, [request(0, engine.limits.max_model_len - 1, 1, DEAR)])


def test_many_prompts_as_long_as_the_context(engine: Assembly) -> None:
    run(engine, [request(i, engine.limits.max_model_len - 4, 4, DEAR) for i in range(12)])


def test_the_most_sequences_with_the_dearest_sampling(engine: Assembly) -> None:
    run(engine, [request(i, 64 + 7 * (i % 50), 24, DEAR) for i in range(engine.limits.max_num_seqs)])


def test_steps_of_all_sizes_leave_no_holes_that_matter(engine: Assembly) -> None:
    source = random.Random(0)
    run(engine, [request(i, source.randint(1, 3000), source.randint(1, 30), DEAR) for i in range(300)])


def test_a_pool_that_is_exhausted_preempts(engine: Assembly) -> None:
    requests = [request(i, 500, 200, SamplingParams(temperature=0.0)) for i in range(64)]
    _, scheduler = run(engine, requests, num_blocks=64 * 600 // engine.limits.block_size)
    assert scheduler.counters.preemptions > 0
