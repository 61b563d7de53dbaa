"""Tokens that are shared out among ranks: each rank's part by Triton's kernels equals the reference's, outputs and
log-sum-exps; and merging them is merging in torch. One rank after the other: their exchange is tested on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from penstock.model.batch import Batch, SharedPrefixes
from penstock.model.loading import load_model
from penstock.model.ops.reference import attend_part
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.attention.merge import merge_parts
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import LoneRank
from penstock.model.sequence import TokenSplit, merged, packed
from penstock.model.shard import Shard
from tests.devices import DEVICE, SLOW_INTERPRETED, matrix, slow
from tests.model.family_configs import SHAPE
from tests.model.ops.triton.pair import TOLERANCES, Both, Heads, close, padded, tensors
from tests.model.ops.triton.test_triton_drafts import spread
from tests.model.ops.triton.test_triton_shared_prefix import Sharing
from tests.model.paged import PagedDriver, make_batch

DECODES = [(0, 1), (15, 1), (16, 1), (31, 1), (32, 1), (40, 1), (47, 1), (200, 1)]
BOTH = [(70, 1), (0, 45), (5, 1), (40, 3), (129, 1), (16, 16), (0, 2)]
FEW = [(15, 1), (16, 1), (0, 37), (40, 1), (31, 3), (0, 1)]
SHAPES = {
    "llama": Heads(8, 2, 64),
    "qwen3": Heads(4, 2, 16, norm=True),
    "window": Heads(4, 1, 32, window=40),
    "short window": Heads(4, 2, 32, window=5, norm=True),
    "capped": Heads(4, 2, 32, window=40, cap=1.5),
    "chunked": Heads(4, 2, 32, window=16, in_chunks=True),
    "sinks": Heads(4, 2, 32, window=40, has_sinks=True),
}
CASES = matrix(
    list(product(TOLERANCES, SHAPES, [(0, 2), (1, 2), (2, 4)])),
    [
        (torch.float32, "qwen3", (0, 2)),
        (torch.float32, "qwen3", (1, 2)),
        (torch.float32, "short window", (1, 2)),
        slow(torch.float32, "capped", (1, 2)),
        slow(torch.float32, "sinks", (0, 2)),
        slow(torch.float32, "sinks", (1, 2)),
        slow(torch.float16, "llama", (2, 4)),
        slow(torch.float16, "window", (0, 2)),
        slow(torch.float32, "chunked", (1, 2)),
    ],
)


def check(both: Both, batch: Batch, num_tokens: int | None = None, *, of_chunks: Batch | None = None) -> None:
    """`of_chunks`: the same tokens as the reference is to be given them; `num_tokens`: all but padding."""
    spec, angles, told = both.heads.spec(both.dtype), both.rope(), of_chunks or batch
    both.ours.begin(batch)
    qkv = both.qkv(batch.num_tokens)
    lse = torch.empty(batch.num_tokens, spec.num_heads, device=DEVICE)
    ours = both.ours.attended(qkv, spec, angles, both.our_kv, batch, lse)
    both.theirs.begin(told)
    count = num_tokens or batch.num_tokens
    theirs, their_lse = both.theirs._attended(qkv[:count], spec, angles, both.their_kv, told, attend_part)
    close(ours[:count], theirs)
    tolerance = TOLERANCES[both.dtype]
    torch.testing.assert_close(lse[:count], their_lse, atol=tolerance, rtol=tolerance)
    assert torch.equal(lse[count:], torch.full_like(lse[count:], -torch.inf))
    assert not ours[count:].any()
    for mine, other in zip(tensors(both.our_kv), tensors(both.their_kv), strict=True):
        is_cleared = mine.transpose(1, 2) == 0  # values behind a chunk's end
        close(mine.transpose(1, 2), torch.where(is_cleared, 0.0, other))


@SLOW_INTERPRETED
@pytest.mark.parametrize(("dtype", "shape", "split"), CASES, ids=str)
def test_a_ranks_part_equals_the_references(dtype: torch.dtype, shape: str, split: tuple[int, int]) -> None:
    """Queries that see nothing of this rank, some and all of a block; tokens that are stored here, and are not."""
    torch.manual_seed(0)
    both = Both(SHAPES[shape], dtype, 16, num_blocks=100, tokens=TokenSplit(*split))
    for lengths in matrix([DECODES, BOTH], [FEW]):
        check(both, make_batch(both.work(lengths), device=DEVICE))


@SLOW_INTERPRETED
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("window", matrix([None, 300], [None, 150]))
def test_contexts_are_split_and_joined(place: int, window: int | None) -> None:
    torch.manual_seed(0)
    both = Both(Heads(4, 1, 16, window), torch.float32, 64, num_blocks=64, tokens=TokenSplit(place, 2))
    both.ours._num_processors = 12  # enough to want chunks
    check(
        both, make_batch(both.work(matrix([(1500, 1), (3, 1), (700, 1), (64, 1)], [(400, 1), (64, 1)])), device=DEVICE)
    )


@SLOW_INTERPRETED
@pytest.mark.parametrize("place", [0, 1])
def test_drafts_are_stored_where_they_are_kept(place: int) -> None:
    torch.manual_seed(0)
    both = Both(Heads(4, 2, 16), torch.float32, 16, num_blocks=60, tokens=TokenSplit(place, 2))
    work = both.work([(14, 4), (30, 3), (7, 1)])  # over edges of blocks, or not
    chunks = make_batch(work, device=DEVICE)
    check(both, spread(work), chunks.num_tokens, of_chunks=chunks)


@SLOW_INTERPRETED
@pytest.mark.parametrize("place", [0, 1])
def test_prefixes_that_are_shared_are_joined_also_where_nothing_else_is_kept(place: int) -> None:
    """Of each block of the table as many tokens are kept here; behind the prefix perhaps none."""
    torch.manual_seed(0)
    both = Both(Heads(4, 2, 16), torch.float32, 16, num_blocks=60, tokens=TokenSplit(place, 2))
    sharing = Sharing([5, 2], [(0, 0), (None, 70), (1, 5), (0, 17), (1, 33), (0, 16)])
    work = sharing.work(replace_block_size(both))
    shared: SharedPrefixes = sharing.shared(16, tile=4)
    check(both, replace(make_batch(work, device=DEVICE), shared=shared))


def replace_block_size(both: Both) -> Both:
    """As the table counts: `Sharing` lays out whole blocks of it."""
    table = replace(both)
    table.block_size, table.free = both.table_block_size, both.free
    return table


@pytest.mark.parametrize("place", [0, 1])
def test_padding_is_kept_nowhere_and_sees_nothing(place: int) -> None:
    both = Both(Heads(4, 2, 16), torch.float32, 16, num_blocks=40, tokens=TokenSplit(place, 2))
    batch = make_batch(both.work([(20, 1)]), device=DEVICE)
    check(both, padded(batch), 1, of_chunks=batch)


@pytest.mark.parametrize("dtype", matrix(list(TOLERANCES), [torch.float32, torch.float16]), ids=str)
@pytest.mark.parametrize(("size", "heads", "dim"), [(2, 3, 16), (4, 1, 40)])
def test_parts_are_merged_as_in_torch(dtype: torch.dtype, size: int, heads: int, dim: int) -> None:
    torch.manual_seed(0)
    out, lse = torch.randn(5, size * heads * dim, device=DEVICE), 5 * torch.randn(5, size * heads, device=DEVICE)
    lse[1, :heads] = -torch.inf
    lse[2] = -torch.inf  # padding
    parts = packed(out.to(dtype), lse, size).contiguous()
    found = merge_parts(parts, heads)
    close(found, merged(parts, heads))
    assert not found[2].any()


@SLOW_INTERPRETED
def test_a_rank_alone_runs_steps_of_its_shapes() -> None:
    """As kernels are compiled with it while weights are loaded."""
    ranks, ops = LoneRank(Shard(1, 4, 2)), TritonOps(DEVICE, torch.float32)
    model = load_model(RandomCheckpoint(SHAPE), ops, ranks=ranks)
    driver = PagedDriver(model, ops, block_size=16, tokens=ranks.shard.tokens)
    sequence = driver.sequence(range(23))
    for count in (20, 1, 2):
        logits = driver.step([(sequence, count)])
        assert logits.shape == (1, SHAPE.vocab_size)
        assert not logits.isnan().any()
