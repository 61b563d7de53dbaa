"""A model with latent attention keeps one latent and one key a token: in its blocks, and for whoever moves them. What
cannot be done with them is refused by name."""

from __future__ import annotations

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.parallelism import parallelism_of
from penstock.core.settings import EngineSettings
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.runner.kernels import choose_kernels
from penstock.runner.kv_memory import parts_of
from penstock.runner.moving import BlockMover, PlainCopies
from tests.model.family_configs import CONFIGS
from tests.model.paged import kv_shape

CONFIG = CONFIGS["deepseek-v3"]


@pytest.fixture(params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> ReferenceOps | NativeOps:
    if request.param == "reference":
        return ReferenceOps()
    try:
        return NativeOps("float32", threads=1)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


def test_a_block_is_one_piece_of_each_layer(ops: ReferenceOps | NativeOps) -> None:
    shape = kv_shape(CONFIG, num_blocks=5, block_size=16)
    parts = parts_of(ops.allocate_kv(shape))
    assert parts.sizes.tolist() == [16 * 64 * 4] * CONFIG.num_layers
    assert shape.block_bytes(4) == 16 * CONFIG.kv_bytes_per_token(4) == sum(parts.sizes)


def test_blocks_go_to_host_memory_and_come_back(ops: ReferenceOps | NativeOps) -> None:
    kv = ops.allocate_kv(kv_shape(CONFIG, num_blocks=4, block_size=4))
    for number, layer in enumerate(kv):
        for block in range(4):
            layer.keys[block].view(torch.uint8).fill_(16 * number + block)
    mover = BlockMover(ops, kv, PlainCopies(ops, kv, 2))
    mover.move([(3, 4)])  # to the host
    mover.move([(0, 3), (4, 1)])  # another in its place, and back to a third
    for number, layer in enumerate(kv):
        found = [int(layer.keys[block].view(torch.uint8).flatten()[0]) for block in range(4)]
        assert found == [16 * number + block for block in (0, 3, 2, 0)]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_latents_are_not_kept_in_8_bits(kv_dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"latent attention \(MLA\)"):
        choose_kernels(CONFIG, EngineSettings(kv_dtype=kv_dtype), torch.device("cpu"))  # type: ignore[arg-type]


def test_ranks_do_not_share_out_their_tokens() -> None:
    with pytest.raises(ConfigError, match=r"sp is 2, but .*\(MLA\): use tp, pp or ep"):
        parallelism_of(EngineSettings(tp=2, sp=2), CONFIG)
