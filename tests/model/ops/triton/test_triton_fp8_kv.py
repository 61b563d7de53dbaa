"""A KV cache in FP8: kernels and reference keep the same numbers, and read the same from them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from penstock.model.ops import KVShape
from tests.devices import DEVICE, NEEDS_FP8, SLOW_INTERPRETED, matrix, slow
from tests.model.ops.triton.pair import ONE_DTYPE, TOLERANCES, Both, Heads, TritonOps, close, rope, tensors
from tests.model.ops.triton.test_triton_shared_prefix import FEW
from tests.model.paged import make_batch

FP8 = torch.float8_e4m3fn
STEPS = {
    "decodes": [(0, 1), (16, 1), (200, 1), (63, 1)],
    "chunks": [(0, 2), (31, 40), (100, 17)],
    "both": [(70, 1), (0, 45), (40, 3), (129, 1)],
}


def cached(heads: Heads, dtype: torch.dtype, block_size: int, scales: tuple[float, float] = (0.5, 0.25)) -> Both:
    torch.manual_seed(0)
    return Both(heads, dtype, block_size, 60, FP8, scales)


HEADS = [Heads(8, 2, 64), Heads(9, 3, 32, window=40), Heads(4, 4, 96)]
CASES = matrix(
    list(product(TOLERANCES, HEADS, STEPS)),
    [
        (torch.float32, Heads(3, 1, 32, window=40), "few of both"),
        slow(torch.float16, HEADS[0], "both"),
        slow(torch.float32, HEADS[2], "both"),
    ],
)


@pytest.mark.parametrize(("dtype", "heads", "step"), CASES, ids=str)
def test_attention_and_cache_equal_the_reference(dtype: torch.dtype, heads: Heads, step: str) -> None:
    both = cached(heads, dtype, block_size=16)
    both.check(both.work([(16, 1), (0, 20), (40, 3)] if step == "few of both" else STEPS[step]))


@ONE_DTYPE
def test_contexts_are_split_and_joined(dtype: torch.dtype) -> None:
    both = cached(Heads(4, 1, 64), dtype, block_size=64)
    both.ours._num_processors = 12  # enough to want chunks
    both.check(both.work(matrix([(1500, 1), (3, 1), (700, 1)], [(130, 1), (3, 1)])))


@SLOW_INTERPRETED
@ONE_DTYPE
def test_shared_prefixes_equal_the_reference(dtype: torch.dtype) -> None:
    both = cached(matrix([Heads(8, 2, 64)], [Heads(4, 2, 16)])[0], dtype, matrix([64], [16])[0])
    both.check(FEW.work(both), FEW.shared(both.block_size, tile=4))


@NEEDS_FP8
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("norm", [False, True])
def test_numbers_of_any_kind_are_rounded_like_the_references(step: str, norm: bool) -> None:
    both = cached(Heads(32, 8, 128, norm=norm), torch.bfloat16, 64, scales=(0.07, 1.3))
    spec, angles = both.heads.spec(torch.bfloat16), rope(128)
    batch = make_batch(both.work(STEPS[step]), device=DEVICE)
    qkv = torch.randn(batch.num_tokens, 48 * 128, device=DEVICE).bfloat16()
    both.ours.begin(batch)
    both.theirs.begin(batch)
    ours = both.ours.attention(qkv, spec, angles, both.our_kv, batch)
    theirs = both.theirs.attention(qkv, spec, angles, both.their_kv, batch)
    torch.testing.assert_close(ours, theirs, atol=0.06, rtol=0.06)
    differs = both.our_kv.keys.transpose(1, 2).float() != both.their_kv.keys.float()
    assert differs.sum() < 0.01 * batch.num_tokens * 8 * 128


def test_what_is_too_large_becomes_the_largest() -> None:
    both = cached(Heads(2, 1, 32), torch.float32, 16)
    flat, spec = both.rope(), both.heads.spec(torch.float32)
    for count in (1, 5):
        work = both.work([(3, count)])
        batch = make_batch(work, device=DEVICE)
        qkv = torch.full((count, 4 * 32), 3000.0, device=DEVICE)
        qkv[:, 3 * 32 :] *= -1.0
        both.ours.begin(batch)
        both.ours.attention(qkv, spec, flat, both.our_kv, batch)
        block = work[0][0].blocks[0]
        for cache, largest in zip(tensors(both.our_kv), (448.0, -448.0), strict=True):
            stored = cache[block, 0, 3 : 3 + count].float()
            assert stored.isfinite().all()
            assert largest in stored


@ONE_DTYPE
def test_last_token_is_the_same_alone_as_in_a_chunk(dtype: torch.dtype) -> None:
    """It attends to its own key and value as others will read them."""
    both = cached(Heads(8, 2, 64), dtype, 16, scales=(4.0, 8.0))  # coarse: what is not rounded shows
    spec, angles = both.heads.spec(dtype), rope(64)
    qkv = torch.randn(2, 12 * 64, device=DEVICE).to(dtype)
    (sequence, _), *_ = both.work([(30, 2)])

    def step(computed: int, count: int) -> torch.Tensor:
        sequence.computed = computed
        batch = make_batch([(sequence, count)], device=DEVICE)
        both.ours.begin(batch)
        rows = qkv[computed - 30 : computed - 30 + count]
        return both.ours.attention(rows, spec, angles, both.our_kv, batch)[-1]

    together = step(30, 2)
    cache = [tensor.clone() for tensor in tensors(both.our_kv)]
    step(30, 1)
    close(step(31, 1), together)
    for before, after in zip(cache, tensors(both.our_kv), strict=True):
        block = sequence.blocks[-1]
        assert torch.equal(before[block].float()[:, :16], after[block].float()[:, :16])


def test_copied_blocks_are_the_same_bits() -> None:
    ops = TritonOps(DEVICE, torch.float16, kv_dtype=FP8)
    kv = ops.allocate_kv(KVShape(num_layers=2, num_blocks=5, block_size=16, num_kv_heads=2, head_dim=16))
    for layer in kv:
        layer.keys.copy_(torch.randn(layer.keys.shape))
    before = [layer.keys.float().clone() for layer in kv]
    ops.copy_blocks(kv, [(0, 3), (4, 1)])
    for layer, keys in zip(kv, before, strict=True):
        assert torch.equal(layer.keys.float(), keys[[0, 4, 2, 0, 4]])
