"""Collectives between nodes, by ranks that are threads here: real sockets, the bits of a sum in rank order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from penstock.core.ranks import RankLost
from penstock.model.shard import Shard
from penstock.runner.ranks.gloo import DistributedLink, DistributedRanks, make_group

J, T = TypeVar("J"), TypeVar("T")
SHAPES = [(1, 5), (3, 64), (7, 333)]


def on_every_rank(
    size: int, run: Callable[[DistributedRanks], list[Tensor]], *, gathered_bytes: int = 1 << 20, sp: int = 1
) -> list[list[Tensor]]:
    store = HashStore()

    def join(rank: int) -> DistributedRanks:
        return DistributedRanks(
            Shard(rank, size, sp),
            torch.device("cpu"),
            store,
            host=f"127.0.0.{rank + 1}",
            timeout_s=60.0,
            gathered_bytes=gathered_bytes,
        )

    return on_all(size, join, run)


def on_all(size: int, join: Callable[[int], J], run: Callable[[J], T]) -> list[T]:
    """What `run` returns on each rank, once all have joined. None is gone, with its connections, before all are done:
    one that is slow would lose it while they meet."""
    with ThreadPoolExecutor(size) as pool:
        joined = list(pool.map(join, range(size)))
        return list(pool.map(run, joined))


def part(rank: int, shape: tuple[int, int]) -> Tensor:
    """Of numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("gathered_bytes", [1 << 20, 0], ids=["gathered", "in-pieces"])
def test_every_rank_has_the_bits_of_a_sum_in_rank_order(size: int, gathered_bytes: int) -> None:
    found = on_every_rank(
        size,
        lambda ranks: [ranks.sum(part(ranks.shard.rank, shape)) for shape in SHAPES],
        gathered_bytes=gathered_bytes,
    )
    for number, shape in enumerate(SHAPES):
        wanted = part(0, shape)
        for rank in range(1, size):
            wanted = wanted + part(rank, shape)
        for sums in found:
            assert torch.equal(sums[number], wanted)


def test_columns_are_gathered_side_by_side_and_the_first_ranks_are_broadcast() -> None:
    def run(ranks: DistributedRanks) -> list[Tensor]:
        own = part(ranks.shard.rank, (3, 4)).to(torch.bfloat16)
        return [ranks.gather(own), ranks.broadcast(torch.tensor([7 - ranks.shard.rank]))]

    for columns, token in on_every_rank(3, run):
        assert torch.equal(columns, torch.cat([part(rank, (3, 4)) for rank in range(3)], dim=1).to(torch.bfloat16))
        assert token.tolist() == [7]


@pytest.mark.parametrize(("size", "sp"), [(2, 2), (4, 2), (4, 4)])
def test_neighbours_gather_and_exchange_among_themselves(size: int, sp: int) -> None:
    """Bit by bit: half of a float32 may look like a bfloat16 that is no number."""

    def brought(rank: int) -> Tensor:
        return torch.stack([part(10 * rank + place, (5, 3)) for place in range(sp)]).view(torch.bfloat16)

    def run(ranks: DistributedRanks) -> list[Tensor]:
        return [ranks.gather(part(ranks.shard.rank, (3, 4)), sp), ranks.exchange(brought(ranks.shard.rank))]

    for rank, (columns, parts) in enumerate(on_every_rank(size, run, sp=sp)):
        near = Shard(rank, size, sp).neighbours
        assert torch.equal(columns, torch.cat([part(other, (3, 4)) for other in near], dim=1))
        wanted = torch.stack([brought(other)[rank - near.start] for other in near])
        assert torch.equal(parts.view(torch.uint8), wanted.view(torch.uint8))


def test_a_stage_receives_what_the_one_before_sends() -> None:
    """As GPUs of several nodes have it; their groups are NCCL's."""
    store, cpu, rows = HashStore(), torch.device("cpu"), (3, 1)

    def join(rank: int) -> DistributedLink:
        group = make_group(cpu, store, rank, 2, host=f"127.0.0.{rank + 1}", timeout_s=60.0)
        return DistributedLink(group, 1 - rank, cpu, hidden=5, dtype=torch.bfloat16)

    def send(link: DistributedLink) -> list[Tensor]:
        for count in rows:
            link.send(part(count, (count, 5)))
        return []

    def receive(link: DistributedLink) -> list[Tensor]:
        return [link.receive(count) for count in rows]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
        sending = pool.submit(send, first)
        received = receive(second)
        sending.result()
    for count, found in zip(rows, received, strict=True):
        assert torch.equal(found, part(count, (count, 5)).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (2, r"rank 5 of the model \(node 5\) is lost: a collective failed: "),
        (3, r"rank 4 of the model \(node 4\) is lost: it lost touch with the other ranks of its stage: "),
    ],
)
def test_nobody_waits_for_ever_for_a_rank_that_hangs(size: int, said: str) -> None:
    """Of two the other is meant. Of more nobody knows which: the one that says so goes, and the leader looks for the
    cause."""
    store = HashStore()

    def one(rank: int) -> DistributedRanks:
        return DistributedRanks(
            Shard(rank, size),
            torch.device("cpu"),
            store,
            host=f"127.0.0.{rank + 1}",
            timeout_s=60.0,
            first_rank=4,
            where=lambda rank: f"node {rank}",
        )

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(one, range(size))
        list(pool.map(lambda ranks: ranks.sum(torch.ones(3)), [first, *others]))  # they have met
    first._group._set_default_timeout(timedelta(seconds=0.02))
    for _ in range(2):
        with pytest.raises(RankLost, match=said):
            first.sum(torch.ones(3))
