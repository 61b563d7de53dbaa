"""The gated delta rule: chunks say what single steps say, and kernels what the reference says, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.model.batch import Batch, BatchStates, LayerState
from penstock.model.ops import DeltaSpec, Norm, Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.delta_rule import chunks, step
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from tests.model.paged import PagedSequence, make_batch


@pytest.fixture(autouse=True)
def dice() -> None:
    torch.manual_seed(3)


def native(threads: int = 2) -> NativeOps:
    try:
        return NativeOps("float32", threads=threads)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def make_spec(key_heads: int = 2, served: int = 2, key_dim: int = 8, value_dim: int = 20, kernel: int = 4) -> DeltaSpec:
    heads = key_heads * served
    channels = key_heads * 2 * key_dim + heads * value_dim
    decay, norm = torch.rand(heads) * 4, Norm(torch.rand(value_dim) + 0.5, 1e-6)
    return DeltaSpec(
        0, key_heads, heads, key_dim, value_dim, torch.randn(kernel, channels), decay, torch.randn(heads), norm
    )


def soiled_state(spec: DeltaSpec, slots: int = 6) -> LayerState:
    conv = torch.full((slots, len(spec.conv) - 1, spec.num_channels), 48.5)
    return LayerState(conv, torch.full((slots, spec.num_value_heads, spec.key_dim, spec.value_dim), 48.5))


class Texts:
    """What a layer is given of some sequences, and what operations make of it, step by step."""

    def __init__(self, spec: DeltaSpec, lengths: list[int]) -> None:
        self.spec = spec
        gates = spec.num_value_heads * spec.value_dim
        self.projected = [torch.randn(length, spec.num_channels + gates) for length in lengths]
        self.ba = [torch.randn(length, 2 * spec.num_value_heads) for length in lengths]

    def run(self, ops: Ops, steps: list[list[tuple[int, int]]], state: LayerState) -> list[Tensor]:
        """`steps`: of each, the sequences in it and how many tokens they bring. What all of a sequence's came to."""
        sequences = [PagedSequence([0] * len(each), [0], state_slot=1 + i) for i, each in enumerate(self.ba)]
        found: list[list[Tensor]] = [[] for _ in self.ba]
        for work in steps:
            batch = make_batch([(sequences[i], count) for i, count in work])
            slots = torch.tensor([sequences[i].state_slot for i, _ in work], dtype=torch.int32)
            batch = replace(batch, states=BatchStates(slots, [state]))
            parts = self._made(ops, work, sequences, batch)
            for (i, count), part in zip(work, parts, strict=True):
                found[i].append(part)
                sequences[i].computed += count
        return [torch.cat(parts) if parts else torch.empty(0) for parts in found]

    def _made(
        self, ops: Ops, work: list[tuple[int, int]], sequences: list[PagedSequence], batch: Batch
    ) -> tuple[Tensor, ...]:
        spans = [(i, slice(sequences[i].computed, sequences[i].computed + count)) for i, count in work]
        projected, ba = (torch.cat([each[i][span] for i, span in spans]) for each in (self.projected, self.ba))
        return ops.delta_rule(projected, ba, self.spec, batch).split_with_sizes([count for _, count in work])


def test_chunks_are_many_steps() -> None:
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, 150, 8), dim=-1) for _ in range(2))
    v, beta, log_decay = torch.randn(2, 3, 150, 5), torch.rand(2, 3, 150), -torch.rand(2, 3, 150)
    memory = torch.randn(2, 3, 8, 5)
    found, after = chunks(q, k, v, beta, log_decay, memory)
    outs = []
    for token in range(150):
        own = slice(token, token + 1)
        out, memory = step(q[:, :, own], k[:, :, own], v[:, :, own], beta[:, :, own], log_decay[:, :, own], memory)
        outs.append(out)
    torch.testing.assert_close(found, torch.cat(outs, dim=2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, memory, atol=1e-4, rtol=1e-4)


def test_forgetting_at_once_is_no_division_by_nothing() -> None:
    q = k = torch.nn.functional.normalize(torch.randn(1, 1, 70, 4), dim=-1)
    v, beta = torch.randn(1, 1, 70, 4), torch.ones(1, 1, 70)
    found, after = chunks(q, k, v, beta, torch.full((1, 1, 70), -100.0), torch.randn(1, 1, 4, 4))
    assert found.isfinite().all()
    torch.testing.assert_close(after, k[:, :, -1, :, None] * v[:, :, -1, None], atol=1e-5, rtol=1e-5)


MIXED = [[(0, 70), (1, 3)], [(1, 1), (0, 1)], [(1, 1), (2, 5), (0, 4)], [(0, 1), (1, 1), (2, 1)]]


@pytest.mark.parametrize(("key_dim", "value_dim", "kernel"), [(8, 20, 4), (16, 64, 2), (6, 7, 3)])
def test_native_kernel_is_the_reference(key_dim: int, value_dim: int, kernel: int) -> None:
    spec = make_spec(key_dim=key_dim, value_dim=value_dim, kernel=kernel)
    texts, ours, theirs = Texts(spec, [76, 6, 6]), soiled_state(spec), soiled_state(spec)
    for found, expected in zip(texts.run(native(), MIXED, ours), texts.run(ReferenceOps(), MIXED, theirs), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(ours.conv, theirs.conv)
    torch.testing.assert_close(ours.recurrent, theirs.recurrent, atol=2e-4, rtol=2e-4)


def test_native_results_do_not_depend_on_the_batch_or_on_chunks() -> None:
    spec = make_spec()
    texts = Texts(spec, [76, 6, 6])
    mixed = texts.run(native(), MIXED, soiled_state(spec))
    for number, length in enumerate([76, 6, 6]):
        alone = texts.run(native(threads=1), [[(number, 2)], [(number, length - 2)]], soiled_state(spec))
        assert torch.equal(alone[number], mixed[number])
