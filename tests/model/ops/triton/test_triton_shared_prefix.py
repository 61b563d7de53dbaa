"""Prefixes that are attended once for all who share them: attention equals the reference, which knows of no sharing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.model.batch import Batch, SharedPrefixes
from penstock.runner.sharing import Group, SharedViews, write_shared
from tests.devices import DEVICE, IS_INTERPRETED, NEEDS_GPU, SLOW_INTERPRETED, matrix, slow
from tests.model.ops.triton.pair import ONE_DTYPE, TOLERANCES, Both, Heads, close, padded, rope
from tests.model.paged import PagedSequence, make_batch

SHAPES = {
    "GQA 4": Heads(8, 2, 64),
    "GQA 3": Heads(9, 3, 32),
    "GQA 1, normed": Heads(2, 2, 16, norm=True),
    "GQA 20": Heads(20, 1, 96),
    "capped": Heads(4, 2, 32, cap=1.5),
    "sinks": Heads(4, 2, 32, has_sinks=True),
}


@dataclass(frozen=True)
class Sharing:
    """Decodes of (group, tokens behind what is shared), or (None, all tokens)."""

    prefixes: Sequence[int]  # blocks of each group's
    decodes: Sequence[tuple[int | None, int]]

    def work(self, both: Both) -> list[tuple[PagedSequence, int]]:
        prefixes = [[both.free.pop() for _ in range(blocks)] for blocks in self.prefixes]
        work = both.work([(own, 1) for _, own in self.decodes])
        for (sequence, _), (group, own) in zip(work, self.decodes, strict=True):
            if group is not None:
                sequence.blocks[:0] = prefixes[group]
                sequence.computed = self.prefixes[group] * both.block_size + own
                sequence.token_ids = [0] * (sequence.computed + 1)
        return work

    def shared(self, block_size: int, tile: int, *, padding: int = 0) -> SharedPrefixes:
        members = [[s for s, (of, _) in enumerate(self.decodes) if of == group] for group in range(len(self.prefixes))]
        groups = [Group(np.array(rows), blocks) for rows, blocks in zip(members, self.prefixes, strict=True)]
        shapes = (len(self.decodes) + padding, 3), (8, tile), (14, 3)  # more than the runner gives such small groups
        views = SharedViews(*(np.full(shape, 77, np.int32) for shape in shapes))
        write_shared(groups, block_size, views)
        return SharedPrefixes(*(torch.from_numpy(view).to(DEVICE) for view in vars(views).values()))


MIXED = Sharing([11, 3], [(0, 0), (None, 70), (1, 5), (0, 17), (1, 100), (0, 1), (None, 0), (0, 63), (0, 64)])
FEW = Sharing([5, 2], [(0, 0), (None, 70), (1, 5), (0, 17), (1, 33), (None, 0), (0, 16)])


CASES = matrix(
    list(product(TOLERANCES, SHAPES, [16, 64], [2, 5])),
    [
        (torch.float32, "GQA 1, normed", 16, 2),
        (torch.float16, "capped", 16, 5),
        (torch.float32, "sinks", 16, 2),
        slow(torch.float32, "GQA 3", 16, 5),
        slow(torch.float16, "GQA 4", 64, 2),
        slow(torch.float32, "GQA 20", 16, 2),
    ],
)


@SLOW_INTERPRETED
@pytest.mark.parametrize(("dtype", "shape", "block_size", "tile"), CASES, ids=str)
def test_attention_equals_the_reference(dtype: torch.dtype, shape: str, block_size: int, tile: int) -> None:
    torch.manual_seed(0)
    both = Both(SHAPES[shape], dtype, block_size, num_blocks=60)
    sharing = MIXED if not IS_INTERPRETED else FEW
    both.check(sharing.work(both), sharing.shared(block_size, tile))


@SLOW_INTERPRETED
@ONE_DTYPE
def test_own_parts_are_split_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = Both(Heads(4, 1, 64), dtype, 64, num_blocks=64)
    both.ours._num_processors = 12  # enough to want chunks
    sharing = Sharing([3], matrix([(0, 700), (0, 3), (None, 900), (0, 130)], [(0, 200), (0, 3), (None, 130)]))
    both.check(sharing.work(both), sharing.shared(64, tile=16), layers=2)


@SLOW_INTERPRETED
def test_chunks_are_attended_in_the_same_step() -> None:
    torch.manual_seed(0)
    both = Both(Heads(4, 2, 32), torch.float32, 16, num_blocks=60)
    sharing = Sharing([5], [(0, 7), (0, 30), (0, 12)])
    chunks = [*both.work([(20, 30)]), *both.work([(0, 5)])]
    both.check(sharing.work(both) + chunks, sharing.shared(16, tile=4, padding=len(chunks)))


@SLOW_INTERPRETED
def test_padding_shares_nothing_and_writes_nothing() -> None:
    torch.manual_seed(0)
    both = Both(Heads(4, 2, 32), torch.float32, 16, num_blocks=60)
    work = FEW.work(both)
    batch = padded(padded(make_batch(work, device=DEVICE)))
    qkv, spec = torch.randn(batch.num_tokens, 8 * 32, device=DEVICE), both.heads.spec(both.dtype)
    shared = replace(batch, shared=FEW.shared(16, tile=4, padding=2))
    both.ours.begin(shared)
    before = both.our_kv.keys.clone()
    ours = both.ours.attention(qkv, spec, rope(32), both.our_kv, shared)
    changed = {block for block in range(60) if not torch.equal(before[block], both.our_kv.keys[block])}
    assert changed == {sequence.blocks[-1] for sequence, _ in work}
    alone = make_batch(work, device=DEVICE)
    both.theirs.begin(alone)
    close(ours[:-2], both.theirs.attention(qkv[:-2], spec, rope(32), both.their_kv, alone))


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_step_stays_right_as_groups_change(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = Both(Heads(8, 2, 128), dtype, 64, num_blocks=400)
    spec, angles, qkv = both.heads.spec(dtype), rope(128), both.qkv(24)

    def made(sharing: Sharing) -> Batch:
        both.free = torch.randperm(400).tolist()
        batch = make_batch(sharing.work(both), device=DEVICE)
        tables = F.pad(batch.block_tables, (0, 40 - batch.block_tables.shape[1]))
        return replace(batch, block_tables=tables, shared=sharing.shared(64, tile=16))

    def step() -> torch.Tensor:
        both.ours.begin(captured)
        return both.ours.attention(qkv, spec, angles, both.our_kv, captured)

    captured = made(Sharing([30], [(0, 10 * i) for i in range(24)]))
    assert captured.shared is not None
    step()
    both.theirs.begin(captured)
    both.theirs.attention(qkv, spec, angles, both.their_kv, captured)  # later steps find these tokens in their blocks
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for sharing in (
        Sharing([30, 4], [(i % 3 if i % 3 < 2 else None, 5 * i) for i in range(24)]),
        Sharing([], [(None, 200)] * 24),
        Sharing([1, 2, 3], [(i % 3, i) for i in range(24)]),
    ):
        current = made(sharing)
        captured.context_lens.copy_(current.context_lens)
        captured.block_tables.copy_(current.block_tables)
        for old, new in zip(vars(captured.shared).values(), vars(current.shared).values(), strict=True):
            old.copy_(new)
        qkv.normal_()
        graph.replay()
        both.theirs.begin(current)
        close(out, both.theirs.attention(qkv, spec, angles, both.their_kv, current))
