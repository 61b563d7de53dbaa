from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.runner import memory
from penstock.runner.memory import GpuMemory, blocks_on_cpu, blocks_on_gpu, blocks_on_host, free_bytes, staged

CPU = torch.device("cpu")
GIB = 1 << 30
BLOCK = 1 << 20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine's free memory that nobody else takes from meanwhile."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 64 * GIB)
    return 64 * GIB


def on_cpu(*, context_length: int = 100, block_bytes: int = BLOCK // 1024, fraction: float | None = None) -> int:
    return blocks_on_cpu(context_length, 16, block_bytes, fraction=fraction)


def test_free_memory_is_some_and_not_more_than_a_machine_has() -> None:
    assert 2**20 < free_bytes(CPU) < 2**50


def test_a_cpu_gets_room_for_a_whole_context_and_never_for_less_than_many_requests() -> None:
    assert on_cpu(context_length=100) == 1024  # 16,384 tokens in blocks of 16
    assert on_cpu(context_length=20_001) == 1251


def test_no_context_is_so_long_that_its_cache_takes_more_than_half_of_memory(free: int) -> None:
    assert on_cpu(context_length=10**12, block_bytes=BLOCK) * BLOCK == free // 2


def test_a_fraction_is_of_a_cpus_free_memory_whatever_the_context(free: int) -> None:
    assert on_cpu(fraction=0.25, block_bytes=BLOCK) * BLOCK == free // 4


def test_a_model_with_no_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="no memory left"):
        on_cpu(block_bytes=2**50)


def gpu(*, total: float = 140, free_before: float = 139, taken: float = 20) -> GpuMemory:
    return GpuMemory(int(total * GIB), int(free_before * GIB), int((free_before - taken) * GIB))


def test_a_gpus_fraction_is_of_all_its_memory_and_for_everything() -> None:
    assert blocks_on_gpu(gpu(taken=20), BLOCK, fraction=0.5) * BLOCK == pytest.approx((70 - 20) * GIB, abs=GIB / 2)
    assert blocks_on_gpu(gpu(taken=30), BLOCK, fraction=None) * BLOCK == pytest.approx((126 - 30) * GIB, abs=GIB / 2)


def test_two_processes_with_half_each_both_fit() -> None:
    first = blocks_on_gpu(gpu(), BLOCK, fraction=0.45)
    assert blocks_on_gpu(gpu(free_before=139 - 63), BLOCK, fraction=0.45) == first


def test_a_gpu_that_others_fill_gives_what_is_free() -> None:
    assert blocks_on_gpu(gpu(free_before=60, taken=20), BLOCK, fraction=0.9) * BLOCK == pytest.approx(
        40 * GIB, abs=GIB / 2
    )


@given(free_before=st.floats(0, 140), taken=st.floats(0, 140), fraction=st.floats(0.01, 1), block=st.integers(1, 2**24))
def test_a_gpu_never_gets_more_than_is_free_or_allowed(
    free_before: float, taken: float, fraction: float, block: int
) -> None:
    memory = gpu(free_before=free_before, taken=min(taken, free_before))
    try:
        cache_bytes = blocks_on_gpu(memory, block, fraction=fraction) * block
    except ConfigError:
        return
    assert 0 < cache_bytes < memory.free_bytes
    assert cache_bytes + memory.taken_bytes < fraction * memory.total_bytes


def test_a_gpu_with_no_room_says_what_takes_how_much_and_what_to_do() -> None:
    message = r"take 20\.0 GiB, memory_fraction allows 14\.0 GiB.* lower chunk_tokens"
    with pytest.raises(ConfigError, match=message) as refused:
        blocks_on_gpu(gpu(taken=20), BLOCK, fraction=0.1)
    assert refused.value.param == "memory_fraction"


def test_blocks_on_the_host_are_as_many_as_were_asked_for_if_they_fit(free: int) -> None:
    assert blocks_on_host(None, block_bytes=1024) == 0
    assert blocks_on_host(0.001, block_bytes=1024) == 1048
    assert blocks_on_host(64.0, block_bytes=1024) == free // 1024
    with pytest.raises(ConfigError, match=r"only 64\.0 GiB of host memory are free"):
        blocks_on_host(64.1, block_bytes=1024)


def test_some_blocks_of_a_gpu_are_for_those_on_their_way_to_the_host() -> None:
    assert staged(12_800) == 200
    assert staged(100) == 4
    with pytest.raises(ConfigError, match="room for 4 KV blocks") as refused:
        staged(4)
    assert refused.value.param == "host_kv_gib"
