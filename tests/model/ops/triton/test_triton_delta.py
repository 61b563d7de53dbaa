"""Triton's gated delta rule says what the reference says, on a GPU or interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops import DeltaSpec, Norm, Ops
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from tests.devices import DEVICE, matrix
from tests.model.ops.test_delta_rule import Texts, make_spec, soiled_state


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "kernel"), matrix([(8, 20, 4), (16, 64, 2), (6, 7, 3), (128, 128, 4)], [(6, 20, 4)])
)
def test_triton_is_the_reference(key_dim: int, value_dim: int, kernel: int) -> None:
    torch.manual_seed(3)
    spec = make_spec(key_dim=key_dim, value_dim=value_dim, kernel=kernel)
    texts, steps = Texts(spec, [21, 4]), [[(0, 18), (1, 2)], [(1, 1), (0, 1)], [(0, 2)], [(1, 1)]]
    ours, theirs = soiled_state(spec), soiled_state(spec)
    on_device = Moved(TritonOps(DEVICE, torch.float32))
    for found, expected in zip(
        texts.run(on_device, steps, ours),  # type: ignore[arg-type]
        texts.run(ReferenceOps(), steps, theirs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(ours.conv, theirs.conv)
    torch.testing.assert_close(ours.recurrent, theirs.recurrent, atol=2e-4, rtol=2e-4)


class Moved:
    """Operations on a device, of tensors on the host."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def delta_rule(self, projected: Tensor, ba: Tensor, spec: DeltaSpec, batch: Batch) -> Tensor:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(DEVICE)

        assert batch.states is not None
        (state,) = batch.states.layers
        on_device = replace(state, conv=moved(state.conv), recurrent=moved(state.recurrent))
        states = replace(batch.states, slots=moved(batch.states.slots), layers=[on_device])
        batch = replace(batch, states=states, query_starts=moved(batch.query_starts), positions=moved(batch.positions))
        norm = Norm(moved(spec.norm.weight), spec.norm.eps)
        spec = replace(spec, conv=moved(spec.conv), decay=moved(spec.decay), dt_bias=moved(spec.dt_bias), norm=norm)
        found = self._ops.delta_rule(moved(projected), moved(ba), spec, batch).cpu()
        state.conv.copy_(on_device.conv)
        state.recurrent.copy_(on_device.recurrent)
        return found
