from __future__ import annotations

import pytest

from penstock.model.loading import load_model
from penstock.model.ops.reference import ReferenceOps
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import SingleRank
from penstock.model.shard import Shard
from penstock.quant import as_stored
from penstock.runner.kernels import Kernels
from penstock.runner.limits import Limits
from penstock.runner.loaded_model import LoadedModel
from tests.model.family_configs import SHAPE

LIMITS = Limits(block_size=16, max_num_seqs=4, chunk_tokens=64, max_model_len=128)


class FakeRanks(SingleRank):
    """A rank that nobody answers: enough to load its part."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


@pytest.mark.parametrize(("size", "num_kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_the_cache_has_the_heads_of_the_rank(size: int, num_kv_heads: int) -> None:
    ops = ReferenceOps()
    model = load_model(RandomCheckpoint(SHAPE), ops, ranks=FakeRanks(Shard(size - 1, size)))
    loaded = LoadedModel(Kernels("torch", "float32", "none", as_stored, ReferenceOps), ops, model, LIMITS)
    kv = loaded.allocate_kv(3)
    assert kv[0].keys.shape == (3, 16, num_kv_heads, SHAPE.head_dim)
    assert 3 * loaded.block_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in kv)
    if size == 1:
        assert loaded.block_bytes == 16 * SHAPE.kv_bytes_per_token(4)


@pytest.mark.parametrize(("size", "sp", "num_kv_heads"), [(2, 2, 2), (4, 2, 1), (4, 4, 2)])
def test_a_rank_that_shares_out_tokens_keeps_a_part_of_every_block(size: int, sp: int, num_kv_heads: int) -> None:
    """Of 16 tokens one in `sp`: no two ranks keep the same, and together they keep what one would."""
    ops, ranks = ReferenceOps(), FakeRanks(Shard(size - 1, size, sp))
    model = load_model(RandomCheckpoint(SHAPE), ops, ranks=ranks)
    kernels = Kernels("torch", "float32", "none", as_stored, ReferenceOps)
    loaded = LoadedModel(kernels, ops, model, LIMITS, ranks=ranks)
    kv = loaded.allocate_kv(3)
    assert kv[0].keys.shape == (3, 16 // sp, num_kv_heads, SHAPE.head_dim)
    assert 3 * loaded.block_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in kv)
    assert size * loaded.block_bytes == 16 * SHAPE.kv_bytes_per_token(4)
    assert loaded.kv_share == 1 / size
