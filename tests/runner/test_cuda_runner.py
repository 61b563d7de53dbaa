"""The GPU's runner against the CPU's: overlapped steps and graphs give the same tokens. Skipped without a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.bench.offline import run_offline
from penstock.core.clock import MonotonicClock
from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.kv.cache import KVCache
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = ModelConfig(
    architecture="llama", vocab_size=500, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=8,
    num_kv_heads=2, head_dim=64, context_length=512,
)  # fmt: skip


def assembled(device: str) -> Assembly:
    settings = EngineSettings(
        device=device, dtype="float32", block_size=16, max_num_seqs=16, chunk_tokens=96, memory_fraction=0.05
    )
    return assemble(RandomCheckpoint(CONFIG), settings, lambda *_: None)


def workload(seed: int, *, greedy: bool) -> list[Request]:
    source = random.Random(seed)
    shared = source.choices(range(500), k=40)
    requests = []
    for i in range(24):
        prompt = shared[: source.choice([0, 0, 16, 40])] + source.choices(range(500), k=source.randint(1, 150))
        sampling = SamplingParams(temperature=0.0)
        if not greedy:
            sampling = SamplingParams(
                temperature=source.choice([0.0, 0.7, 1.3]), top_p=source.choice([1.0, 0.8]),
                top_k=source.choice([None, 20]), presence_penalty=source.choice([0.0, 1.5]), seed=i,
                num_logprobs=source.choice([None, 2]),
            )  # fmt: skip
        requests.append(Request(f"r{i}", prompt, source.randint(1, 40), sampling))
    return requests


def answers(assembly: Assembly, requests: list[Request], num_blocks: int) -> dict[str, list[int]]:
    budget = StepBudget(assembly.chunk_tokens, target_s=None, floor=16)
    scheduler = Scheduler(KVCache(num_blocks, 16), budget, max_num_seqs=assembly.max_num_seqs)
    run = run_offline(requests, scheduler, assembly.runner, MonotonicClock())
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for event in run.events:
        found[event.request_id] += event.token_ids
    assert scheduler.cache.pool.num_free == num_blocks
    return found


@pytest.fixture(scope="module")
def gpu() -> Assembly:
    return assembled("cuda")


@pytest.fixture(scope="module")
def cpu() -> Assembly:
    return assembled("cpu")


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("num_blocks", [400, 40])  # with room for all, and with preemptions
def test_tokens_equal_the_cpus(gpu: Assembly, cpu: Assembly, greedy: bool, num_blocks: int) -> None:
    assert gpu.kernels == "triton"
    for seed in range(3):
        requests = workload(seed, greedy=greedy)
        expected, found = answers(cpu, requests, num_blocks), answers(gpu, requests, num_blocks)
        same = sum(expected[name] == found[name] for name in expected)
        assert same >= len(expected) - 1, f"{len(expected) - same} of {len(expected)} answers differ"
