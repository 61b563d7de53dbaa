"""Blocks to host memory and back beside a GPU's work: everything arrives as it was when it was to leave."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.model.ops import KVShape
from penstock.runner.moving import BlockMover
from penstock.runner.pinned import PinnedMemory
from tests.devices import NEEDS_GPU

DEVICE, HOST = 12, 9


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="asks for") as refused:
        PinnedMemory(1 << 60)
    assert refused.value.param == "host_kv_gib"


class Cache:
    """Blocks full of one number each, and what is known of them. Streams are slowed down at random, so that whoever
    does not wait finds something else."""

    def __init__(self, dtype: torch.dtype, seed: int, staging_blocks: int) -> None:
        from penstock.model.ops.triton import TritonKV, TritonOps
        from penstock.runner.cuda_moving import CudaCopies

        ops = TritonOps("cuda", torch.bfloat16, kv_dtype=dtype)
        kv = ops.allocate_kv(KVShape(3, DEVICE, 16, 2, 32))
        assert isinstance(kv[0], TritonKV)
        self._pool = kv[0].pool.view(torch.uint8)
        self._host = CudaCopies(kv, HOST, staging_blocks)
        self._mover = BlockMover(ops, kv, self._host)
        self._random = random.Random(seed)
        self.known: list[int | None] = [*[0] * DEVICE, *[None] * HOST]

    def step(self) -> None:
        """As the engine's: some copies, then blocks are written."""
        draw, pairs = self._random, []
        for _ in range(draw.randint(0, 8)):
            source, target = draw.randrange(DEVICE + HOST), draw.randrange(DEVICE + HOST)
            if self.known[source] is not None and min(source, target) < DEVICE:
                self.known[target] = self.known[source]
                pairs.append((source, target))
        self._slow_down()
        self._mover.move(pairs)
        for block in draw.sample(range(DEVICE), k=draw.randint(0, 6)):
            self.known[block] = draw.randrange(1, 256)
            self._pool[:, :, block] = self.known[block]

    def _slow_down(self) -> None:
        streams = [torch.cuda.current_stream(), self._host._out.stream, self._host._in.stream]
        with torch.cuda.stream(self._random.choice(streams)):
            torch.cuda._sleep(self._random.choice([0, 100_000, 1_000_000]))

    def check(self) -> None:
        self._check_device()
        there = [block for block in range(DEVICE, DEVICE + HOST) if self.known[block] is not None]
        self._mover.move([(block, block - DEVICE) for block in there])
        self.known[:HOST] = [self.known[DEVICE + i] if DEVICE + i in there else self.known[i] for i in range(HOST)]
        self._check_device()

    def _check_device(self) -> None:
        found = self._pool.transpose(0, 2).flatten(1).cpu()
        for block, expected in enumerate(self.known[:DEVICE]):
            assert set(found[block].tolist()) == {expected}, f"block {block}"


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("staging_blocks", [4, 14, 64])
def test_whatever_is_slow_everything_arrives(dtype: torch.dtype, staging_blocks: int) -> None:
    for seed in range(12):
        cache = Cache(dtype, seed, staging_blocks)
        for _ in range(25):
            cache.step()
        cache.check()


@NEEDS_GPU
def test_a_copy_is_measured_and_changes_nothing() -> None:
    cache = Cache(torch.bfloat16, 0, 8)
    for _ in range(10):
        cache.step()
    assert 0 < cache._mover.measure() < 1
    cache._check_device()


@NEEDS_GPU
def test_another_thread_sees_saved_blocks_once_it_has_waited_and_what_it_writes_is_loaded() -> None:
    cache = Cache(torch.bfloat16, 0, 8)
    host, pool = cache._host, cache._pool

    def read(block: int) -> set[int]:
        host.wait_saved()
        (part,) = host.parts(block)
        return set(part.tolist())

    def write(block: int, number: int) -> None:
        host.wait_saved()
        (part,) = host.parts(block)
        part[:] = bytes([number]) * len(part)

    with ThreadPoolExecutor(1) as thread:
        for number in range(1, 8):
            pool[:, :, 3] = number
            with torch.cuda.stream(host._out.stream):
                torch.cuda._sleep(20_000_000)
            host.save([(3, 5)])
            assert thread.submit(read, 5).result() == {number}
            host.save([(3, 6)])
            thread.submit(write, 6, 100 + number).result()  # not before what goes there is there
            host.load([(6, 4)])
            assert set(pool[:, :, 4].flatten().tolist()) == {100 + number}
