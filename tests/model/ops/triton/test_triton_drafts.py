"""A few tokens of one sequence as decodes of their own, stored before they attend: as the same tokens in a chunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from penstock.model.batch import Batch, SharedPrefixes
from penstock.runner.sharing import Room, SharedViews, share
from tests.devices import DEVICE, SLOW_INTERPRETED, matrix, slow
from tests.model.ops.triton.pair import LAYERS, TOLERANCES, Both, Heads, close, padded, tensors
from tests.model.paged import PagedSequence, make_batch

SHAPES = {
    "llama": Heads(8, 2, 64),
    "qwen3": Heads(4, 2, 16, norm=True),
    "window": Heads(4, 2, 32, window=20),
    "capped": Heads(4, 2, 32, cap=1.5),
}


def spread(work: list[tuple[PagedSequence, int]]) -> Batch:
    """Every token a sequence of one."""
    singles = [
        (PagedSequence(sequence.token_ids[: place + 1], sequence.blocks, place), 1)
        for sequence, count in work
        for place in range(sequence.computed, sequence.computed + count)
    ]
    return replace(padded(make_batch(singles, device=DEVICE)), stores_first=True)


def check(both: Both, work: list[tuple[PagedSequence, int]], batch: Batch) -> None:
    spec, angles = both.heads.spec(both.dtype), both.rope()
    both.ours.begin(batch)
    qkv = both.qkv(batch.num_tokens)
    for _ in range(LAYERS):
        ours = both.ours.attention(qkv, spec, angles, both.our_kv, batch)
    chunks = make_batch(work, device=DEVICE)
    both.theirs.begin(chunks)
    theirs = both.theirs.attention(qkv[: chunks.num_tokens], spec, angles, both.their_kv, chunks)
    close(ours[: chunks.num_tokens], theirs)
    for mine, other in zip(tensors(both.our_kv), tensors(both.their_kv), strict=True):
        close(mine.transpose(1, 2).to(both.dtype), other.to(both.dtype))


CASES = matrix(
    list(product(TOLERANCES, SHAPES)),
    [
        (torch.float32, "qwen3"),
        slow(torch.float32, "window"),
        slow(torch.float16, "capped"),
        slow(torch.float16, "llama"),
    ],
)


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_drafts_attend_to_those_before_them(dtype: torch.dtype, shape: str) -> None:
    torch.manual_seed(0)
    both = Both(SHAPES[shape], dtype, 16, num_blocks=60)
    lengths = matrix([(0, 3), (30, 5), (7, 1), (15, 2), (64, 17)], [(0, 3), (7, 1), (15, 2)])
    work = both.work(lengths)  # over edges of blocks, or not
    check(both, work, spread(work))


def test_contexts_of_drafts_are_split_and_joined() -> None:
    torch.manual_seed(0)
    both = Both(Heads(4, 1, 64), torch.float32, 64, num_blocks=64)
    both.ours._num_processors = 12
    work = both.work(matrix([(700, 3), (3, 2)], [(200, 2), (3, 2)]))
    check(both, work, spread(work))


@SLOW_INTERPRETED
def test_what_drafts_of_one_sequence_share_is_read_once() -> None:
    torch.manual_seed(0)
    both = Both(Heads(4, 1, matrix([64], [16])[0]), torch.float32, 16, num_blocks=200)
    work = both.work([(2039, 12), (5, 2)])  # from the middle of a block to that of the next
    batch = spread(work)
    room = Room(batch.num_sequences, tile=16, wanted=5)
    arrays = [torch.zeros(shape, dtype=torch.int32) for shape in room.shapes]
    views = SharedViews(*(array.numpy() for array in arrays))
    assert share(batch.block_tables.cpu().numpy(), batch.positions.cpu().numpy(), 16, views)
    shared = SharedPrefixes(*(array.to(DEVICE) for array in arrays))
    check(both, work, replace(batch, shared=shared))
