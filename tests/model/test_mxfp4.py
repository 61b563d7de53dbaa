"""gpt-oss with experts in MXFP4 says what transformers' model says, on one rank and on two, as it is and in C."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.core.expert_placement import ExpertSharing
from penstock.hub.hf import HFCheckpoint
from penstock.model.expert_layers import ExpertLayers
from penstock.model.layers import Decoder
from penstock.model.loading import load_model
from penstock.model.ops import Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.native_experts import NativeExperts
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ranks import Ranks
from penstock.model.sparse import SparseLayer
from tests.hub.mxfp4_checkpoints import EXPERTS, write_mxfp4
from tests.model.paged import PagedDriver
from tests.model.ranks import on_every_rank

PROMPT = torch.randint(0, 256, (23,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[HFCheckpoint, Tensor]:
    path = tmp_path_factory.mktemp("mxfp4")
    theirs = write_mxfp4(path)
    return HFCheckpoint(path), theirs(torch.tensor([PROMPT])).logits[0]


def says(
    checkpoint: HFCheckpoint, ops: Ops, ranks: Ranks | None = None, sharing: ExpertSharing | None = None
) -> Tensor:
    experts = None
    if ranks is not None and sharing is not None:
        experts = ExpertLayers.of(ops, ranks.shard, checkpoint.config.num_layers, EXPERTS, sharing)
    loaded = load_model(checkpoint, ops, ranks=ranks, experts=experts)
    return PagedDriver(loaded, ops, block_size=4).prefill(PROMPT, chunk=9)


def keeping() -> NativeOps:
    try:
        return NativeOps("float32", threads=1, keeps=frozenset({4}))
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("sharing", [None, ExpertSharing(1)], ids=["tp", "ep"])
def test_one_rank_and_two_say_what_transformers_says(
    model: tuple[HFCheckpoint, Tensor], sharing: ExpertSharing | None
) -> None:
    checkpoint, expected = model
    torch.testing.assert_close(says(checkpoint, ReferenceOps()), expected, atol=1e-4, rtol=1e-4)
    for found in on_every_rank(2, lambda ranks: says(checkpoint, ReferenceOps(), ranks, sharing)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sharing", [None, ExpertSharing(1)], ids=["tp", "ep"])
def test_kernels_that_keep_4_bits_round_activations_alone(
    model: tuple[HFCheckpoint, Tensor], sharing: ExpertSharing | None
) -> None:
    checkpoint, expected = model
    keeping()
    for found in (
        says(checkpoint, keeping()),
        *on_every_rank(2, lambda each: says(checkpoint, keeping(), each, sharing)),
    ):
        assert (found - expected).norm() / expected.norm() < 0.03


def test_experts_take_four_bits_and_a_quarter_in_memory(model: tuple[HFCheckpoint, Tensor]) -> None:
    def num_bytes(make_ops: Callable[[], NativeOps]) -> int:
        loaded = load_model(model[0], make_ops())
        assert isinstance(loaded, Decoder)
        layer = loaded.layers[0]
        assert isinstance(layer, SparseLayer)
        assert isinstance(layer.mlp.experts, NativeExperts)
        return sum(each.num_bytes for pair in layer.mlp.experts._pairs for each in pair)

    numbers = EXPERTS * 3 * 64 * 128
    assert num_bytes(keeping) == numbers * 4.25 / 8
    assert num_bytes(lambda: NativeOps("float32", threads=1)) == numbers * 4
