"""Experts of a layer that are counted, replicated and moved between ranks, which are threads here: the model says the
same with every placement, also when it changes between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.expert_placement import ExpertPlacement, ExpertSharing, balanced_placement
from penstock.core.model_config import Experts, ModelConfig
from penstock.model.expert_layers import ExpertLayers
from penstock.model.loading import load_model
from penstock.model.ops import Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import Ranks
from penstock.model.shard import Shard
from tests.model.family_configs import CONFIGS
from tests.model.paged import PagedDriver
from tests.model.ranks import on_every_rank

PROMPT = list(range(3, 40))
HOT = [500, 400, 3, 90, 2, 7, 60, 0]  # of mixtral's eight experts
FAMILY = CONFIGS["mixtral"]
PER_TOKEN = 2


def native_ops() -> Ops:
    try:
        return NativeOps("float32", threads=1)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def mixture(
    config: ModelConfig, ops: Ops, ranks: Ranks | None, sharing: ExpertSharing | None
) -> tuple[PagedDriver, ExpertLayers]:
    assert config.experts is not None
    shard = Shard() if ranks is None else ranks.shard
    layers = ExpertLayers.of(ops, shard, config.num_layers, config.experts.count, sharing)
    model = load_model(RandomCheckpoint(config), ops, ranks=ranks, experts=layers)
    return PagedDriver(model, ops, block_size=4), layers


def on_two(config: ModelConfig) -> ModelConfig:
    return replace(config, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def whole() -> Tensor:
    return mixture(on_two(FAMILY), ReferenceOps(), None, None)[0].prefill(PROMPT, chunk=30)


@pytest.mark.parametrize("make_ops", [ReferenceOps, native_ops], ids=["reference", "native"])
@pytest.mark.parametrize("redundant", [0, 1, 2])
def test_copies_of_hot_experts_change_nothing_that_is_said(
    redundant: int, make_ops: Callable[[], Ops], whole: Tensor
) -> None:
    sharing = ExpertSharing(redundant, {0: HOT, 1: HOT[::-1]})

    def says(ranks: Ranks) -> tuple[Tensor, Tensor, list[ExpertPlacement | None]]:
        driver, layers = mixture(on_two(FAMILY), make_ops(), ranks, sharing)
        return driver.prefill(PROMPT, chunk=30), layers.counts, [layers.placement(layer) for layer in (0, 1)]

    found = on_every_rank(2, says)
    for logits, counts, placements in found:
        torch.testing.assert_close(logits, whole, rtol=2e-4, atol=2e-4)
        assert torch.equal(counts, found[0][1]), "all ranks count alike"
        assert placements == [balanced_placement(HOT, 2, redundant), balanced_placement(HOT[::-1], 2, redundant)]
        assert counts.sum(dim=(1, 2)).tolist() == [PER_TOKEN * len(PROMPT)] * 2


def test_counts_are_those_of_one_rank(whole: Tensor) -> None:
    """However experts are placed, and also where each rank has a part of every expert."""
    driver, alone = mixture(on_two(FAMILY), ReferenceOps(), None, None)
    driver.prefill(PROMPT, chunk=30)
    expected = alone.counts.sum(dim=2)

    def counts(sharing: ExpertSharing | None) -> Callable[[Ranks], Tensor]:
        def run(ranks: Ranks) -> Tensor:
            driver, layers = mixture(on_two(FAMILY), ReferenceOps(), ranks, sharing)
            driver.prefill(PROMPT, chunk=30)
            return layers.counts.sum(dim=2)

        return run

    for sharing in (None, ExpertSharing(), ExpertSharing(1, {0: HOT, 1: HOT})):
        assert all(torch.equal(found, expected) for found in on_every_rank(2, counts(sharing)))


@pytest.mark.parametrize("make_ops", [ReferenceOps, native_ops], ids=["reference", "native"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_move_between_two_steps(family: str, make_ops: Callable[[], Ops]) -> None:
    """One layer after the other, to and fro: also to fewer copies and to more. An expert that all tokens pass is split
    as ever."""
    config = on_two(CONFIGS[family])
    assert isinstance(config.experts, Experts)
    count = config.experts.count
    expected = mixture(config, ReferenceOps(), None, None)[0].prefill(PROMPT, chunk=5)
    loads = [[(7 * expert + turn * 31) % 23 ** (turn + 1) for expert in range(count)] for turn in range(7)]

    def says(ranks: Ranks) -> tuple[Tensor, int]:
        driver, layers = mixture(config, make_ops(), ranks, ExpertSharing(1))
        sequence, rows, moved = driver.sequence(PROMPT), [], 0
        for turn, begin in enumerate(range(0, len(PROMPT), 5)):
            rows.append(driver.step([(sequence, min(5, len(PROMPT) - begin))], every_row=True))
            layer = layers.layers[sorted(layers.layers)[turn % len(layers.layers)]]
            moved += layer.place(balanced_placement(loads[turn % 7], 2, turn % 2))
        return torch.cat(rows), moved

    for logits, moved in on_every_rank(2, says):
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
        assert moved > 0


def test_counts_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 experts for layer 0, and the model 8: it was recorded with another model"):
        on_every_rank(2, lambda ranks: mixture(on_two(FAMILY), ReferenceOps(), ranks, ExpertSharing(0, {0: [1, 2, 3]})))
