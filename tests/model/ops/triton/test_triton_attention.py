"""Attention and cache writes of Triton's kernels equal the torch reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.model.loading import random_model
from penstock.model.ops import KVShape
from penstock.model.ops.reference import ReferenceOps
from tests.devices import DEVICE, NEEDS_GPU, SLOW_INTERPRETED, matrix, slow
from tests.model.ops.triton.pair import ONE_DTYPE, TOLERANCES, Both, Heads, TritonOps, close, padded, rope, tensors
from tests.model.paged import PagedSequence, make_batch

DECODES = [(0, 1), (1, 1), (15, 1), (16, 1), (200, 1), (63, 1), (64, 1)]
CHUNKS = [(0, 2), (0, 33), (31, 40), (100, 17)]
BOTH = [(70, 1), (0, 45), (5, 1), (40, 3), (129, 1)]
FEW_OF_BOTH = [(15, 1), (0, 33), (70, 1), (31, 3), (0, 1)]
SHAPES = {
    "llama": Heads(8, 2, 64),
    "smollm2": Heads(9, 3, 64),
    "qwen3": Heads(4, 2, 16, norm=True),
    "phi3": Heads(4, 4, 96),
    "window": Heads(4, 2, 32, window=40),
    "short window": Heads(4, 2, 32, window=5, norm=True),
    "one kv head": Heads(20, 1, 32),
    "capped": Heads(4, 2, 32, window=40, cap=1.5),
    "chunked": Heads(4, 2, 32, window=16, in_chunks=True),
    "gpt-oss": Heads(16, 2, 64, window=40, has_sinks=True),
    "sinks": Heads(6, 2, 16, has_sinks=True),
}


# Interpreted, each once: norms, caps and windows, windows shorter than a tile, sizes that are no powers of two.
CASES = matrix(
    list(product(TOLERANCES, SHAPES, [16, 64])),
    [
        (torch.float32, "qwen3", 16),
        (torch.float32, "capped", 16),
        (torch.float16, "short window", 16),
        (torch.float32, "sinks", 16),
        slow(torch.float16, "gpt-oss", 64),
        slow(torch.float32, "smollm2", 64),
        slow(torch.float32, "phi3", 16),
        slow(torch.float16, "llama", 64),
        slow(torch.float16, "window", 64),
        slow(torch.float32, "one kv head", 16),
        slow(torch.float32, "chunked", 16),
    ],
)


@SLOW_INTERPRETED
@pytest.mark.parametrize(("dtype", "shape", "block_size"), CASES, ids=str)
def test_attention_and_cache_equal_the_reference(dtype: torch.dtype, shape: str, block_size: int) -> None:
    torch.manual_seed(0)
    both = Both(SHAPES[shape], dtype, block_size, num_blocks=100)
    for lengths in matrix([DECODES, CHUNKS, BOTH], [FEW_OF_BOTH]):
        both.check(both.work(lengths))


@SLOW_INTERPRETED
@ONE_DTYPE
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", matrix([None, 300], [None, 150]))
def test_contexts_are_split_and_joined(dtype: torch.dtype, window: int | None, has_sinks: bool) -> None:
    """A sink counts once, in however many chunks a context is."""
    torch.manual_seed(0)
    both = Both(Heads(4, 1, 64, window, has_sinks=has_sinks), dtype, 64, num_blocks=64)
    both.ours._num_processors = 12  # enough to want chunks
    both.check(both.work(matrix([(1500, 1), (3, 1), (700, 1), (64, 1)], [(200, 1), (3, 1), (64, 1)])), layers=2)


@pytest.mark.parametrize("num_sequences", matrix([1, 255, 300], [1, slow(300)]))
def test_batches_larger_than_a_kernels_stride_are_found(num_sequences: int) -> None:
    torch.manual_seed(0)
    both = Both(Heads(2, 1, 16), torch.float32, 16, num_blocks=700)
    both.check(both.work([(i % 7, 1 + i % 3) for i in range(num_sequences)]))


def test_nan_in_a_stale_slot_reaches_nobody() -> None:
    both = Both(Heads(4, 2, 32), torch.float32, 16, num_blocks=40)
    work = both.work([(17, 1), (3, 6)])
    for sequence, count in work:
        slot = (sequence.computed + count) % 16
        for cache in tensors(both.our_kv):
            cache[sequence.blocks[-1], :, slot:] = torch.nan
        for cache in tensors(both.their_kv):
            cache[sequence.blocks[-1], slot:] = 0.0
    batch = make_batch(work, device=DEVICE)
    both.ours.begin(batch)
    spec, qkv = both.heads.spec(both.dtype), torch.randn(batch.num_tokens, 8 * 32, device=DEVICE)
    both.theirs.begin(batch)
    ours = both.ours.attention(qkv, spec, rope(32), both.our_kv, batch)
    close(ours, both.theirs.attention(qkv, spec, rope(32), both.their_kv, batch))


@NEEDS_GPU
def test_captured_step_stays_right_as_contexts_grow() -> None:
    torch.manual_seed(0)
    both = Both(Heads(8, 2, 64), torch.float32, 64, num_blocks=200)
    work = both.work([(computed, 1) for computed in (1, 63, 900, 5000)])
    work[-1][0].blocks.extend(both.free.pop() for _ in range(20))  # the captured table is as wide as it will ever be
    spec, angles = both.heads.spec(both.dtype), rope(64)
    batch = make_batch(work, device=DEVICE)
    qkv = torch.randn(4, 12 * 64, device=DEVICE)

    def step() -> torch.Tensor:
        both.ours.begin(batch)
        qkv.mul_(1.0)  # as in a step: the plan is complete before a layer begins
        return both.ours.attention(qkv, spec, angles, both.our_kv, batch)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for growth in (0, 1, 700):
        for sequence, _ in work:
            sequence.computed += growth
            sequence.token_ids += [0] * growth
            while len(sequence.blocks) * 64 <= sequence.computed:
                sequence.blocks.append(both.free.pop())
        grown = make_batch(work, device=DEVICE)
        batch.context_lens.copy_(grown.context_lens)
        batch.block_tables.copy_(grown.block_tables[:, : batch.block_tables.shape[1]])
        qkv.normal_()
        graph.replay()
        both.theirs.begin(grown)
        close(out, both.theirs.attention(qkv, spec, angles, both.their_kv, grown))


def test_padding_sequence_writes_nothing() -> None:
    both = Both(Heads(4, 2, 32), torch.float32, 16, num_blocks=40)
    work = both.work([(20, 1)])
    batch = padded(make_batch(work, device=DEVICE))
    before = both.our_kv.keys.clone()
    both.ours.begin(batch)
    both.ours.attention(
        torch.randn(2, 8 * 32, device=DEVICE), both.heads.spec(both.dtype), rope(32), both.our_kv, batch
    )
    changed = {block for block in range(40) if not torch.equal(before[block], both.our_kv.keys[block])}
    assert changed == {work[0][0].blocks[1]}


def test_copied_blocks_appear_in_every_layer_and_nowhere_else() -> None:
    ops = TritonOps(DEVICE, torch.float32)
    kv = ops.allocate_kv(KVShape(num_layers=2, num_blocks=5, block_size=16, num_kv_heads=2, head_dim=8))
    for layer in kv:
        layer.keys.normal_()
        layer.values.normal_()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in kv]
    ops.copy_blocks(kv, [(0, 3), (4, 1)])
    ops.copy_blocks(kv, [])
    for layer, (keys, values) in zip(kv, before, strict=True):
        assert torch.equal(layer.keys, keys[[0, 4, 2, 0, 4]])
        assert torch.equal(layer.values, values[[0, 4, 2, 0, 4]])


def test_block_that_no_tile_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size is 24"):
        TritonOps(DEVICE, torch.float32).allocate_kv(KVShape(1, 4, 24, 2, 16))


@SLOW_INTERPRETED
def test_model_of_many_steps_equals_the_reference() -> None:
    config = ModelConfig("qwen3", 256, 64, 96, 2, 4, 2, 16, 256, windows=(20, None))
    logits = []
    for ops in (TritonOps(DEVICE, torch.float32), ReferenceOps(DEVICE)):
        model = random_model(config, ops)
        kv = ops.allocate_kv(KVShape(2, 12, 16, 2, 16))
        first, second = (
            PagedSequence(list(range(70)), [3, 7, 1, 9, 5]),
            PagedSequence(list(range(90, 140)), [8, 2, 4, 6]),
        )
        rows = []
        for counts in matrix([(30, 0), (1, 20), (1, 9), (7, 1), (1, 1), (1, 1)], [(30, 0), (1, 20), (7, 1), (1, 1)]):
            work = [(s, count) for s, count in zip((first, second), counts, strict=True) if count]
            batch = make_batch(work, device=DEVICE)
            if isinstance(ops, TritonOps):
                ops.begin(batch)
            with torch.inference_mode():
                rows.append(model(batch, kv))
            for sequence, count in work:
                sequence.computed += count
        logits.append(torch.cat(rows))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
