"""Sums that are taken by one of two ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.model.shard import Shard
from penstock.runner.ranks.by_size import SumsBySize, nccl_beyond_bytes


class Way:
    """Collectives of ranks that all bring the same, and what was asked of it."""

    def __init__(self, name: str, asked: list[tuple[str, str, int]]) -> None:
        self.shard = Shard(1, 2)
        self._name, self._asked = name, asked

    def _note(self, what: str, x: Tensor) -> None:
        self._asked.append((self._name, what, x.nbytes))

    def sum(self, x: Tensor) -> Tensor:
        self._note("sum", x)
        return 2 * x

    def gather(self, x: Tensor, among: int | None = None) -> Tensor:
        self._note("gather", x)
        return torch.cat([x] * (among or 2), dim=1)

    def exchange(self, x: Tensor) -> Tensor:
        self._note("exchange", x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        self._note("broadcast", x)
        return x


def test_a_sum_goes_by_its_size_and_all_else_the_small_way() -> None:
    asked: list[tuple[str, str, int]] = []
    ranks = SumsBySize(Way("small", asked), Way("large", asked), beyond_bytes=64)
    assert ranks.shard == Shard(1, 2)
    for count in (16, 17):
        x = torch.ones(1, count)
        assert torch.equal(ranks.sum(x), 2 * x)
        assert ranks.gather(x).shape == (1, 2 * count)
        assert ranks.gather(x, among=1).shape == (1, count)
        assert torch.equal(ranks.exchange(x), x)
        assert torch.equal(ranks.broadcast(x), x)
    ranks.sum(torch.ones(32, dtype=torch.bfloat16))
    assert [(way, what) for way, what, _ in asked if what == "sum"] == [
        ("small", "sum"),
        ("large", "sum"),
        ("small", "sum"),
    ]
    assert {way for way, what, _ in asked if what != "sum"} == {"small"}


@pytest.mark.parametrize(("num_ranks", "mib"), [(2, 64), (3, 64), (4, 32), (6, 32), (8, 64), (16, 64)])
def test_the_size_is_that_of_the_next_smaller_number_of_ranks(num_ranks: int, mib: int) -> None:
    assert nccl_beyond_bytes(num_ranks) == mib << 20
