"""The driver's calls through ctypes, against a fake libcuda in C that has the declarations of cuda.h."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from penstock.core.errors import ConfigError, EngineFailed, EngineUnavailable
from penstock.core.nodes import NodeMap
from penstock.core.parallelism import Parallelism
from penstock.core.parking import MemoryChange
from penstock.core.settings import EngineSettings
from penstock.link.connection import Connection
from penstock.model.ops.build import find_compiler
from penstock.model.stages import Stage
from penstock.runner.cuda_driver import CudaDriver
from penstock.runner.mapped_memory import MappedMemory, RankPool
from penstock.runner.ranks.follower import _Calls
from penstock.runner.ranks.join import LoneStage, Place
from penstock.runner.ranks.leader import Follower, Leader
from penstock.runner.ranks.led import LedMemory
from penstock.runner.ranks.messages import Started, from_follower_decoder, to_follower_decoder
from penstock.runner.ranks.rank_cache import LentPool, map_pool, pool_at
from penstock.runner.virtual_memory import Keep, VirtualMemory

SOURCE = Path(__file__).parent / "fake_libcuda.c"
DEVICE = torch.device("cpu", 0)
GRANULE, TOTAL = 2 << 20, 64 << 20


class HostDriver(CudaDriver):
    """The real calls; only what torch does of them is the host's."""

    def free_bytes(self) -> int:
        return TOTAL - ctypes.c_size_t.in_dll(self._library, "fake_taken").value

    def wait(self) -> None:
        pass


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("fake") / "libcuda.so"
    subprocess.run(
        [*find_compiler(), "-shared", "-fPIC", "-Wall", "-Werror", str(SOURCE), "-o", str(built)], check=True
    )
    return str(built)


def test_memory_is_parked_and_woken_at_its_addresses(library: str) -> None:
    driver = HostDriver(DEVICE, library)
    assert driver.granularity == GRANULE
    memory = VirtualMemory(driver, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    weights, kv = memory.allocate(GRANULE + 5, Keep.ONCE), memory.zeros((3, 4), dtype=torch.float32, device=DEVICE)
    weights.fill_(7)
    kv.fill_(1.0)
    free = driver.free_bytes()
    for _ in range(2):
        assert memory.park().num_bytes == 3 * GRANULE == TOTAL - free
        assert memory.wake().num_bytes == 3 * GRANULE
        assert set(weights.tolist()) == {7}
        assert kv.count_nonzero() == 0
    kv.fill_(2.0)
    descriptor = memory.export(kv)
    with mmap.mmap(descriptor, GRANULE) as shared:  # as another process would
        os.close(descriptor)
        assert torch.tensor(list(shared[:48]), dtype=torch.uint8).view(torch.float32).tolist() == [2.0] * 12
    with pytest.raises(EngineUnavailable, match="GiB of free memory"):
        memory.allocate(TOTAL, Keep.NEVER)
    with pytest.raises(RuntimeError, match="cuMemMap failed with error 1: invalid argument"):
        driver.map(GRANULE, GRANULE, 3)
    memory.park()
    assert driver.free_bytes() == TOTAL


def test_memory_of_another_process_is_mapped_to_be_read(library: str) -> None:
    driver = HostDriver(DEVICE, library)
    memory = VirtualMemory(driver, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    kv = memory.zeros((GRANULE + 4,), dtype=torch.uint8, device=DEVICE)
    kv.fill_(5)
    assert memory.size_of(kv) == 2 * GRANULE
    descriptor = memory.export(kv)
    imported, address = driver.import_memory(descriptor), driver.reserve(2 * GRANULE)
    os.close(descriptor)
    driver.map(address, 2 * GRANULE, imported, is_writable=False)
    other = driver.tensor(address, 2 * GRANULE)
    assert other[GRANULE + 3] == 5
    kv[GRANULE + 3] = 6
    assert other[GRANULE + 3] == 6
    maps = Path("/proc/self/maps").read_text().splitlines()
    permissions = [line.split()[1] for line in maps if line.startswith(f"{address:x}-")]
    assert permissions == ["r--s"]
    driver.unmap(address, 2 * GRANULE)
    driver.release(imported)
    driver.free(address, 2 * GRANULE)
    memory.park()
    assert driver.free_bytes() == TOTAL


def test_another_ranks_cache_is_read_written_lent_and_let_go_of_while_it_is_parked(library: str) -> None:
    driver = HostDriver(DEVICE, library)
    memory = VirtualMemory(driver, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    kv = memory.zeros((3, 2, 5, 2, 4, 8), dtype=torch.bfloat16, device=DEVICE)  # as Triton's kernels have it
    lent = LentPool(memory, kv, b"word")
    pool = pool_at(lent.offer(), b"word", driver)
    assert pool.parts.shape == (6, 5, 128)
    address = pool.parts.data_ptr()
    for number in (1.0, 2.0):
        kv[2, 1, 4] = number
        assert pool.parts[5, 4].view(torch.bfloat16).tolist() == [number] * 64
        pool.parts[1, 3].view(torch.bfloat16).fill_(number + 0.5)
        assert set(kv[0, 1, 3].flatten().tolist()) == {number + 0.5}
        descriptor = pool.export()
        assert os.fstat(descriptor).st_size == GRANULE
        os.close(descriptor)
        pool.unmap()
        lent.withdraw()
        memory.park()
        assert driver.free_bytes() == TOTAL
        with pytest.raises(RuntimeError, match="parked"):
            pool.export()
        memory.wake()
        map_pool(pool, lent.offer(), b"word")
        assert pool.parts.data_ptr() == address
    lent.withdraw()
    pool.unmap()
    memory.park()
    assert driver.free_bytes() == TOTAL


def test_a_rank_that_does_not_know_the_word_or_hands_over_too_little_is_refused(library: str) -> None:
    driver = HostDriver(DEVICE, library)
    memory = VirtualMemory(driver, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    lent = LentPool(memory, memory.zeros((1, 2, 2, 4), dtype=torch.float32, device=DEVICE), b"word")
    handle = lent.offer()
    with pytest.raises(EngineFailed, match="cannot be reached"):
        pool_at(handle, b"another", driver)
    with pytest.raises(EngineFailed, match="cannot be mapped: cuMemMap"):
        pool_at(replace(handle, num_bytes=2 * GRANULE), b"word", driver)
    lent.withdraw()
    memory.park()
    assert driver.free_bytes() == TOTAL


def test_memory_that_cannot_be_mapped_leaves_nothing_behind(library: str) -> None:
    driver = HostDriver(DEVICE, library)
    memory = VirtualMemory(driver, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    descriptor = memory.export(memory.zeros((4,), dtype=torch.uint8, device=DEVICE))
    mapped = MappedMemory(driver, 2 * GRANULE, is_writable=False)
    with pytest.raises(RuntimeError, match="cuMemMap"):
        mapped.map(descriptor)
    mapped.close()
    with pytest.raises(RuntimeError, match="cuMemMap"):
        RankPool(driver, 2 * GRANULE, (1, 1, 4)).map(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    memory.park()
    assert driver.free_bytes() == TOTAL


class Own:
    """The leader's own memory, which is not looked at."""

    def park(self) -> MemoryChange:
        return MemoryChange({})

    wake = park


def test_the_leader_lets_go_of_its_ranks_caches_for_a_park_and_has_the_new_ones_after_a_wake(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = HostDriver(DEVICE, library)
    monkeypatch.setattr(
        "penstock.runner.ranks.leader.reach_pool", lambda handle, word, _: pool_at(handle, word, driver)
    )
    nodes, parallelism = NodeMap((2,), ("",)), Parallelism(tp=2)
    place = Place(parallelism, nodes, LoneStage(), Stage(), DEVICE)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["true"])
    follower = Follower(1, process, Connection(ours, from_follower_decoder))
    leader = Leader(place, [follower], EngineSettings(rank_timeout_s=60.0))
    connection = Connection(theirs, to_follower_decoder)
    # The follower's side: its loop, with memory of the fake driver.
    memory = VirtualMemory(driver, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    kv = memory.zeros((1, 2, 3, 8), dtype=torch.float32, device=DEVICE)
    lent = LentPool(memory, kv, leader._word)
    calls = _Calls(SimpleNamespace(memory=memory), connection, lent, answers=False)  # type: ignore[arg-type]
    connection.send(Started("GPU-1", lent.offer()))
    uuids, (pool,) = leader.started()
    assert uuids == ("GPU-1",)
    assert isinstance(pool, RankPool)
    leader.watch(lambda lost: None)
    led = LedMemory(Own(), leader)
    led.park()
    calls.make(connection.receive(60.0))
    assert driver.free_bytes() == TOTAL
    with ThreadPoolExecutor(1) as threads:
        waking = threads.submit(led.wake)
        calls.make(connection.receive(60.0))
        waking.result(60.0)
    kv[0, 1, 2] = 3.0
    assert pool.parts[1, 2].view(torch.float32).tolist() == [3.0] * 8
    led.park()
    lent.withdraw()
    memory.park()
    assert driver.free_bytes() == TOTAL
    process.wait()


def test_a_machine_whose_driver_has_nothing_of_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parkable"):
        CudaDriver(DEVICE, str(tmp_path / "no such library"))
