"""Four ways through a layer's experts, and one result: what each row's experts make of it, weighed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import ExpertLinears
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.experts import HostExperts, MaskedExperts, StackedExperts, device_experts
from penstock.model.ops.native import NativeOps
from penstock.model.ops.native_experts import NativeExperts
from penstock.model.ops.reference import ReferenceOps
from penstock.model.quantized import plain
from tests.model.ops.low_bit import grouped

COUNT, PER_TOKEN, HIDDEN, FFN = 6, 2, 32, 48


def pairs() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(2 * FFN, HIDDEN) * 0.2, torch.randn(HIDDEN, FFN) * 0.2) for _ in range(COUNT)]


def choices(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """One expert is chosen by nobody."""
    torch.manual_seed(rows)
    best = torch.randn(rows, COUNT - 1).softmax(dim=1).topk(PER_TOKEN, dim=1)
    return torch.randn(rows, HIDDEN), best.indices, best.values


def expected(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    found, made = pairs(), torch.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            gate, up = (found[expert][0] @ x[row]).chunk(2)
            made[row] += weight * (found[expert][1] @ (F.silu(gate) * up))
    return made


@pytest.mark.parametrize("rows", [1, 2, 19])
@pytest.mark.parametrize("way", [HostExperts, NativeExperts, MaskedExperts, StackedExperts])
def test_each_row_gets_the_sum_of_its_own_experts(way: type[ExpertLinears], rows: int) -> None:
    if way is NativeExperts:
        try:
            experts = NativeOps("float32", threads=2).experts(COUNT, pairs())
        except KernelsUnavailable as error:
            pytest.skip(str(error))
    elif way is HostExperts:
        experts = ReferenceOps().experts(COUNT, pairs())
    else:
        experts = device_experts(ReferenceOps(), COUNT, pairs(), can_group=way is StackedExperts)
    assert type(experts) is way
    x, ids, weights = choices(rows)
    torch.testing.assert_close(experts(x, ids, weights), expected(x, ids, weights), atol=1e-5, rtol=1e-4)


def test_integers_are_not_stacked() -> None:
    small = [(grouped(gate_up, 4, 32), grouped(down, 4, 48)) for gate_up, down in pairs()]
    ops = ReferenceOps()
    experts = device_experts(ops, COUNT, small, can_group=True)
    assert isinstance(experts, MaskedExperts)
    x, ids, weights = choices(9)
    wide = HostExperts.of(ops, [(plain(gate_up), plain(down)) for gate_up, down in small])
    torch.testing.assert_close(experts(x, ids, weights), wide(x, ids, weights), atol=1e-5, rtol=1e-4)


def test_what_an_expert_makes_of_a_row_that_is_not_its_own_is_dropped() -> None:
    broken = pairs()
    broken[COUNT - 1][1].fill_(torch.inf)
    x, ids, weights = choices(5)  # nobody chooses that one
    found = device_experts(ReferenceOps(), COUNT, broken, can_group=False)(x, ids, weights)
    torch.testing.assert_close(found, expected(x, ids, weights), atol=1e-5, rtol=1e-4)
