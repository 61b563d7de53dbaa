"""Two ways through a layer's experts on a CPU, and one result: what each row's experts make of it, weighed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import ExpertLinears, ExpertWeights
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.experts import HostExperts
from penstock.model.ops.native import NativeOps
from penstock.model.ops.native_experts import NativeExperts
from penstock.model.ops.reference import ReferenceOps

COUNT, PER_TOKEN, HIDDEN, FFN = 6, 2, 32, 48


def pairs() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(2 * FFN, HIDDEN) * 0.2, torch.randn(HIDDEN, FFN) * 0.2) for _ in range(COUNT)]


def expert_weights() -> list[ExpertWeights]:
    return [ExpertWeights(*pair) for pair in pairs()]


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
@pytest.mark.parametrize("way", [HostExperts, NativeExperts])
def test_each_row_gets_the_sum_of_its_own_experts(way: type[ExpertLinears], rows: int) -> None:
    if way is NativeExperts:
        try:
            experts = NativeOps("float32", threads=2).experts(COUNT, expert_weights())
        except KernelsUnavailable as error:
            pytest.skip(str(error))
    else:
        experts = ReferenceOps().experts(COUNT, expert_weights())
    assert type(experts) is way
    x, ids, weights = choices(rows)
    torch.testing.assert_close(experts(x, ids, weights), expected(x, ids, weights), atol=1e-5, rtol=1e-4)
