"""Blocks of a cache packed and unpacked: to the bit what indexing finds."""

from __future__ import annotations

import pytest
import torch

from penstock.model.ops import KVShape
from penstock.model.ops.triton import TritonKV
from penstock.model.ops.triton.attention.kv_copy import as_words, copy_between, gather_blocks, scatter_blocks
from tests.devices import DEVICE, matrix
from tests.model.ops.triton.pair import TritonOps

IDS = torch.tensor([5, 0, 7, 2], dtype=torch.int32)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", matrix([80, 128, 256], [80]))
def test_blocks_go_and_come_back(kv_dtype: torch.dtype, head_dim: int) -> None:
    first = TritonOps(DEVICE, torch.bfloat16, kv_dtype=kv_dtype).allocate_kv(KVShape(3, 9, 16, 2, head_dim))[0]
    assert isinstance(first, TritonKV)
    words = as_words(first.pool)
    words.random_()
    was = words.clone()
    ids = IDS.to(DEVICE)
    packed = torch.full((6, words.shape[0], words.shape[2]), -1, dtype=torch.int32, device=DEVICE)
    gather_blocks(words, ids, packed)
    assert torch.equal(packed[:4], was[:, ids.long()].transpose(0, 1))
    assert torch.all(packed[4:] == -1)

    others = (ids + 1) % 9
    scatter_blocks(packed, others, words)
    was[:, others.long()] = was[:, ids.long()]
    assert torch.equal(words, was)


def test_blocks_go_to_another_cache_of_another_size() -> None:
    ops = TritonOps(DEVICE, torch.bfloat16)
    caches = [ops.allocate_kv(KVShape(3, num_blocks, 16, 2, 80))[0] for num_blocks in (9, 6)]
    source, target = (as_words(cache.pool) for cache in caches if isinstance(cache, TritonKV))
    source.random_()
    target.random_()
    was, ours = target.clone(), torch.tensor([1, 4, 0, 3], dtype=torch.int32, device=DEVICE)
    theirs = IDS.to(DEVICE)
    copy_between(source, theirs, target, ours)
    was[:, ours.long()] = source[:, theirs.long()]
    assert torch.equal(target, was)
