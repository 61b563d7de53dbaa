"""Attention over latents, whose keys have their values in them, by Triton's kernels equals the torch reference."""

from __future__ import annotations

import pytest
import torch

from tests.devices import DEVICE, SLOW_INTERPRETED, matrix, slow
from tests.model.ops.triton.pair import ONE_DTYPE, Both, Heads, close, padded
from tests.model.ops.triton.test_triton_drafts import spread
from tests.model.paged import make_batch

SMALL = Heads(5, 1, 40, value_dim=32)
SHAPES = {
    "small": SMALL,
    "sizes that are no powers of two": Heads(20, 1, 60, value_dim=48),
    "DeepSeek-V2-Lite": Heads(16, 1, 576, value_dim=512),
    "DeepSeek-V3": Heads(128, 1, 576, value_dim=512),
}
MIXED = matrix([(70, 1), (0, 45), (5, 1), (40, 3), (129, 1), (63, 2)], [(15, 1), (0, 20), (31, 3), (0, 1)])
CASES = matrix(
    [
        *((torch.bfloat16, shape, 64) for shape in SHAPES),
        (torch.bfloat16, "DeepSeek-V3", 16),
        (torch.float16, "DeepSeek-V2-Lite", 64),
        (torch.float32, "DeepSeek-V2-Lite", 64),
        (torch.float32, "small", 16),
    ],
    [
        (torch.float32, "small", 16),
        slow(torch.float16, "sizes that are no powers of two", 64),
    ],
)


@SLOW_INTERPRETED
@pytest.mark.parametrize(("dtype", "shape", "block_size"), CASES, ids=str)
def test_prompts_and_decodes_equal_the_reference(dtype: torch.dtype, shape: str, block_size: int) -> None:
    torch.manual_seed(0)
    both = Both(SHAPES[shape], dtype, block_size, num_blocks=100)
    both.check(both.work(MIXED))


@SLOW_INTERPRETED
@ONE_DTYPE
def test_contexts_are_split_and_joined(dtype: torch.dtype) -> None:
    """Values are narrower than a tile: what is beyond them is the next head's, and the next row's."""
    torch.manual_seed(0)
    both = Both(Heads(5, 1, 40, value_dim=24), dtype, 64, num_blocks=64)
    both.ours._num_processors = 12  # enough to want chunks
    both.check(both.work(matrix([(1500, 1), (3, 1), (700, 1), (64, 1)], [(200, 1), (3, 1), (64, 1)])))


@SLOW_INTERPRETED
def test_drafts_of_a_sequence_see_those_before_them() -> None:
    torch.manual_seed(0)
    both = Both(SMALL, torch.float32, 16, num_blocks=64)
    work = both.work([(30, 3), (7, 1)])
    drafts, whole = spread(work), make_batch(work, device=DEVICE)
    spec, angles, qkv = both.heads.spec(both.dtype), both.rope(), both.qkv(5)
    both.ours.begin(drafts)
    ours = both.ours.attention(qkv, spec, angles, both.our_kv, drafts)[:4]  # behind them is padding
    both.theirs.begin(whole)
    close(ours, both.theirs.attention(qkv[:4], spec, angles, both.their_kv, whole))


def test_nan_in_a_stale_slot_reaches_nobody_and_padding_writes_nothing() -> None:
    both = Both(SMALL, torch.float32, 16, num_blocks=40)
    work = both.work([(17, 1), (3, 6)])
    for sequence, count in work:
        slot = (sequence.computed + count) % 16
        both.our_kv.keys[sequence.blocks[-1], :, slot:] = torch.nan
        both.their_kv.keys[sequence.blocks[-1], slot:] = 0.0
    batch = make_batch(work, device=DEVICE)
    spec, qkv, angles = both.heads.spec(both.dtype), both.qkv(batch.num_tokens + 1), both.rope()
    before = both.our_kv.keys.clone()
    wide = padded(batch)
    both.ours.begin(wide)
    ours = both.ours.attention(qkv, spec, angles, both.our_kv, wide)[:-1]
    both.theirs.begin(batch)
    close(ours, both.theirs.attention(qkv[:-1], spec, angles, both.their_kv, batch))
    same = (both.our_kv.keys == before) | (both.our_kv.keys.isnan() & before.isnan())
    assert {block for block in range(40) if not same[block].all()} == {work[0][0].blocks[1], work[1][0].blocks[0]}
