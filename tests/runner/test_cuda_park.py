"""An engine that is parked and woken: its tokens are the same to the bit, its adapters are where they were. On a GPU
the driver has its memory meanwhile, and graphs and addresses stay."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from penstock.bench.offline import run_offline
from penstock.bench.park import ParkBench
from penstock.core.clock import MonotonicClock
from penstock.core.errors import EngineUnavailable
from penstock.core.model_config import ModelConfig
from penstock.core.request import AdapterRef, Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.peft import read_peft
from penstock.kv.cache import KVCache
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.runner.rehome import tensors_of
from penstock.runner.virtual_memory import VirtualMemory
from penstock.sched.budget import StepBudget
from penstock.sched.lora import AdapterSlots
from penstock.sched.scheduler import Scheduler
from tests.devices import NEEDS_GPU
from tests.model.lora import EVERY_LINEAR, write_adapter

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=500,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    context_length=2048,
)
FRACTION = 0.05  # of a GPU
BLOCKS = 2000  # that schedulers here know of


@cache
def assembled(device: str, quant: str = "none") -> Assembly:
    settings = EngineSettings(
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16" if device == "cuda" else "float32",
        quant=quant,  # type: ignore[arg-type]
        block_size=16,
        max_num_seqs=16,
        chunk_tokens=512,
        memory_fraction=FRACTION if device == "cuda" else None,
        max_loras=2,
        parkable=True,
    )
    return assemble(RandomCheckpoint(CONFIG), settings, lambda *_: None)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU), pytest.param("cuda int4", marks=NEEDS_GPU)])
def engine(request: pytest.FixtureRequest) -> Iterator[Assembly]:
    made = assembled(*request.param.split())
    yield made
    gc.collect()


@pytest.fixture
def on_gpu() -> Assembly:
    return assembled("cuda")


def scheduler(made: Assembly, slots: AdapterSlots | None = None) -> Scheduler:
    budget = StepBudget(made.limits.chunk_tokens, target_s=None, floor=made.limits.block_size)
    cache = KVCache(min(BLOCKS, made.size.num_blocks), made.limits.block_size)
    return Scheduler(cache, budget, max_num_seqs=made.limits.max_num_seqs, adapters=slots)


def test_tokens_are_the_same_to_the_bit_after_every_wake(engine: Assembly) -> None:
    assert engine.memory is not None
    bench = ParkBench(engine.memory, engine.runner, lambda: scheduler(engine), CONFIG.vocab_size)
    rounds = [bench.round() for _ in range(2)]
    assert [one.is_equal for one in rounds] == [True, True]
    assert all(one.given_back_bytes > 1 << 20 for one in rounds)
    assert ("pin" in rounds[0].park_s, "pin" in rounds[1].park_s) == (engine.device.name.startswith("cuda"), False)


def test_an_adapter_on_the_device_outlives_a_park(engine: Assembly, tmp_path: Path) -> None:
    """It is in its slot after the wake, without having been put there again."""
    assert engine.memory is not None
    assert engine.adapters is not None
    path = write_adapter(tmp_path / "adapter", CONFIG, seed=1, rank=8, targets=EVERY_LINEAR)
    digest = read_peft(path).digest
    engine.adapters.keep(engine.adapters.read(str(path), digest))
    slots = AdapterSlots(2)

    def answer(adapter: AdapterRef | None) -> list[int]:
        request = Request("r", list(range(60)), 24, SamplingParams(temperature=0.0), adapter=adapter)
        found = run_offline([request], scheduler(engine, slots), engine.runner, MonotonicClock())
        return [token for event in found.events for token in event.token_ids]

    plain, adapted = answer(None), answer(AdapterRef(digest, "adapter"))
    assert plain != adapted
    assert slots.swaps == 1
    for _ in range(2):
        engine.memory.park()
        engine.memory.wake()
        assert (answer(None), answer(AdapterRef(digest, "adapter"))) == (plain, adapted)
    assert slots.swaps == 1


@NEEDS_GPU
def test_the_driver_has_weights_and_cache_while_it_is_parked(on_gpu: Assembly) -> None:
    assert isinstance(on_gpu.memory, VirtualMemory)
    taken = on_gpu.memory.num_bytes
    assert taken >= on_gpu.size.kv_bytes + 2 * CONFIG.num_parameters
    free = torch.cuda.mem_get_info()[0]
    parked = on_gpu.memory.park()
    assert torch.cuda.mem_get_info()[0] - free == parked.num_bytes >= 0.99 * taken
    left = torch.cuda.mem_get_info()[0] - parked.num_bytes // 2
    other = torch.empty(left, dtype=torch.uint8, device="cuda")  # somebody else has it
    free_beside = torch.cuda.mem_get_info()[0]
    with pytest.raises(EngineUnavailable, match="GiB"):
        on_gpu.memory.wake()
    assert torch.cuda.mem_get_info()[0] == free_beside, "nothing of it was kept"
    del other
    torch.cuda.empty_cache()
    assert on_gpu.memory.wake().num_bytes == parked.num_bytes
    assert abs(torch.cuda.mem_get_info()[0] - free) < 64 << 20


@NEEDS_GPU
def test_no_weight_is_left_outside_and_addresses_stay(on_gpu: Assembly) -> None:
    assert isinstance(on_gpu.memory, VirtualMemory)
    memory, runner = on_gpu.memory, on_gpu.runner
    reached = [one for one in tensors_of(runner._model) if one.is_cuda and one.numel()]  # type: ignore[attr-defined]
    weights = [one for one in reached if one.is_floating_point()]  # integers are lists of work, which kernels keep
    cache = [layer.keys for layer in runner._kv]  # type: ignore[attr-defined]
    outside = [f"{one.dtype} {list(one.shape)}" for one in [*weights, *cache] if not memory.holds(one.data_ptr())]
    assert not outside, " ".join(outside)
    before = [one.data_ptr() for one in [*weights, *cache]]
    memory.park()
    memory.wake()
    assert [one.data_ptr() for one in [*weights, *cache]] == before
    assert all(layer.keys.count_nonzero() == 0 for layer in runner._kv)  # type: ignore[attr-defined]


@NEEDS_GPU
def test_the_caches_memory_can_be_exported_to_another_process(on_gpu: Assembly) -> None:
    assert isinstance(on_gpu.memory, VirtualMemory)
    descriptor = on_gpu.memory.export(on_gpu.runner._kv[0].pool)  # type: ignore[attr-defined]
    try:
        os.fstat(descriptor)
    finally:
        os.close(descriptor)
