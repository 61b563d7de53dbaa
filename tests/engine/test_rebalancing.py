"""Rebalancing: what is planned from counts, and that it is carried out a layer at a time."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.errors import Conflict, EngineFailed, PenstockError, UnsupportedTask
from penstock.core.expert_load import ExpertLoad, LayerLoad
from penstock.core.expert_placement import ExpertPlacement, plain_placement
from penstock.engine.client import as_error
from penstock.engine.expert_client import ExpertClient
from penstock.engine.messages import ExpertState, RebalanceAnswer, RebalanceExperts, ToEngine
from penstock.engine.rebalancing import Rebalancing


class FakeRanks:
    """Two ranks with two experts each, and a layer for each list of counts."""

    def __init__(self, *counts: list[int], redundant: int | None = 0) -> None:
        self.redundant = redundant
        self.counts = list(counts)
        self.placed = [plain_placement(4, 2)] * len(counts)

    def load(self) -> ExpertLoad:
        return ExpertLoad(
            {
                layer: LayerLoad(list(counts), [list(own) for own in self.placed[layer].ranks], [0, 0])
                for layer, counts in enumerate(self.counts)
            }
        )

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        self.placed[layer] = placement


def test_layers_move_one_at_a_time_and_the_answer_comes_after_the_last() -> None:
    ranks = FakeRanks([9, 9, 1, 1], [5, 5, 5, 5], [0, 8, 8, 0])
    rebalancing = Rebalancing(ranks)
    assert rebalancing.begin() is None
    assert rebalancing.is_busy
    answer = rebalancing.step()
    assert answer == RebalanceAnswer(1, 36 / 28, 1.0), "the others are even as they are"
    assert not rebalancing.is_busy
    assert ranks.placed[0] == ExpertPlacement(((0, 2), (1, 3)))
    assert ranks.placed[1:] == [plain_placement(4, 2)] * 2


def test_the_next_plan_is_for_the_tokens_since_the_last() -> None:
    ranks = FakeRanks([9, 9, 1, 1])
    rebalancing = Rebalancing(ranks)
    rebalancing.begin()
    rebalancing.step()
    refused = rebalancing.begin()
    assert refused is not None
    assert refused.code == Conflict.code
    ranks.counts = [[10, 9, 9, 1]]
    assert rebalancing.begin() is None, "0 and 2 are busy now, and lie together"
    assert rebalancing.step() == RebalanceAnswer(1, 9 / 4.5, 8 / 4.5)


@pytest.mark.parametrize("ranks", [None, FakeRanks([1, 2, 3, 4], redundant=None)])
def test_experts_that_are_not_shared_out_cannot_be_moved(ranks: FakeRanks | None) -> None:
    refused = Rebalancing(ranks).begin("a model")
    assert refused is not None
    assert (refused.code, refused.model) == (UnsupportedTask.code, "a model")


def client() -> tuple[ExpertClient, list[ToEngine]]:
    sent: list[ToEngine] = []
    return ExpertClient(sent.append, lambda: None, as_error), sent


def load(*tokens: int) -> ExpertState:
    return ExpertState(ExpertLoad({0: LayerLoad(list(tokens), [[0], [1]], list(tokens))}))


def test_recent_load_is_that_between_the_readings_at_hand() -> None:
    experts, _ = client()
    assert experts.load is experts.recent is None
    experts.take(load(10, 10))
    assert experts.rank_imbalance == 1.0
    experts.take(load(40, 20))
    assert experts.recent == load(30, 10).load
    assert experts.rank_imbalance == 1.5
    experts.end()
    assert experts.load is None
    assert experts.rank_imbalance == 0.0


def test_one_rebalancing_is_asked_for_at_a_time() -> None:
    async def ask() -> tuple[RebalanceAnswer, list[ToEngine]]:
        experts, sent = client()
        asked = asyncio.ensure_future(experts.rebalance())
        await asyncio.sleep(0)
        with pytest.raises(Conflict):
            await experts.rebalance()
        experts.take(RebalanceAnswer(3, 2.0, 1.0))
        return await asked, sent

    assert asyncio.run(ask()) == (RebalanceAnswer(3, 2.0, 1.0), [RebalanceExperts()])


@pytest.mark.parametrize("dies", [True, False])
def test_who_asked_is_told_why_not(dies: bool) -> None:
    async def ask() -> None:
        experts, _ = client()
        asked = asyncio.ensure_future(experts.rebalance())
        await asyncio.sleep(0)
        if dies:
            experts.end()
        else:
            experts.take(RebalanceAnswer(code=UnsupportedTask.code, message="it needs --ep"))
        await asked

    kind: type[PenstockError] = EngineFailed if dies else UnsupportedTask
    with pytest.raises(kind):
        asyncio.run(ask())
