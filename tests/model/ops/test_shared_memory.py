"""Collectives of a host through real shared memory, by ranks that are threads here: sums are in rank order, and nobody
waits for a rank that hangs or is gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from penstock.core.ranks import RankLost
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.shared_memory import SharedMemoryRanks
from penstock.model.shard import Shard

SLOT_BYTES = 1024  # 256 numbers: larger ones go in pieces
SHAPES = [(1, 5), (3, 64), (7, 129)]
COLLECTIVES: dict[str, Callable[[SharedMemoryRanks], Tensor]] = {
    "sum": lambda ranks: ranks.sum(torch.ones(3, 4)),
    "gather": lambda ranks: ranks.gather(torch.ones(3, 4)),
    "exchange": lambda ranks: ranks.exchange(torch.ones(ranks.shard.sp, 3, 4)),
    "broadcast": lambda ranks: ranks.broadcast(torch.ones(3)),
}


@contextmanager
def joined(
    size: int, *, timeout_s: float = 60.0, sp: int = 1, first_rank: int = 0
) -> Iterator[list[SharedMemoryRanks]]:
    try:
        memory = SharedMemoryRanks.create(size, SLOT_BYTES)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    shared = {"timeout_s": timeout_s, "slot_bytes": SLOT_BYTES, "first_rank": first_rank}
    yield [SharedMemoryRanks(Shard(rank, size, sp), os.dup(memory), **shared) for rank in range(size)]  # type: ignore[arg-type]
    os.close(memory)


def on_every_rank(ranks: list[SharedMemoryRanks], run: Callable[[SharedMemoryRanks], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def part(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_bits_of_a_sum_in_rank_order(size: int) -> None:
    with joined(size) as ranks:
        for shape in SHAPES:
            wanted = part(0, shape)
            for rank in range(1, size):
                wanted = wanted + part(rank, shape)
            for found in on_every_rank(ranks, lambda one, shape=shape: one.sum(part(one.shard.rank, shape))):
                assert torch.equal(found, wanted)


@pytest.mark.parametrize(("size", "sp"), [(2, 1), (2, 2), (4, 2)])
def test_columns_are_gathered_and_parts_exchanged_among_neighbours(size: int, sp: int) -> None:
    with joined(size, sp=sp) as ranks:
        for found in on_every_rank(ranks, lambda one: one.gather(part(one.shard.rank, (7, 40)))):
            assert torch.equal(found, torch.cat([part(rank, (7, 40)) for rank in range(size)], dim=1))
        exchanged = on_every_rank(ranks, lambda one: one.exchange(part(one.shard.rank, (sp, 7, 40))))
        for rank, found in enumerate(exchanged):
            near = ranks[rank].shard.neighbours
            wanted = torch.stack([part(other, (sp, 7, 40))[rank - near.start] for other in near])
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_hangs_is_named_and_given_up_for_good(collective: str) -> None:
    """Rank 5 of a model whose second stage begins with rank 4."""
    run, said = COLLECTIVES[collective], "rank 5 of the model is lost: it did not come to a collective"
    with joined(2, timeout_s=0.02, sp=2, first_rank=4) as (first, second):
        for _ in range(2):
            with pytest.raises(RankLost, match=said):
                run(first)
        run(second)  # late: what the first has brought is there …
        with pytest.raises(RankLost, match=said):
            run(second)  # … and no more comes


def test_a_wait_ends_when_any_rank_learns_that_another_is_gone() -> None:
    with joined(3, timeout_s=600.0) as ranks, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(one.sum, torch.ones(3)) for one in ranks[:2]]
        ranks[0].give_up(2)
        for each in waiting:
            with pytest.raises(RankLost, match="rank 2 of the model"):
                each.result(60.0)
