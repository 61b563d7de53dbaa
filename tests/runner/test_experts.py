"""A rank's experts beside its steps: what it counts, also across a new placement, and files of recorded counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.expert_load import ExpertLoad, LayerLoad
from penstock.core.expert_placement import ExpertPlacement, ExpertSharing
from penstock.model.expert_layers import ExpertLayers
from penstock.model.ops import ExpertWeights
from penstock.model.ops.reference import ReferenceOps
from penstock.model.shard import Shard
from penstock.runner.experts import RankExperts, read_expert_counts


def two_ranks() -> tuple[ExpertLayers, RankExperts, list[str]]:
    """The first of two ranks that share four experts, with a copy of two of them, in layer 1 of 2."""
    ops, moved = ReferenceOps(), list[str]()
    layers = ExpertLayers.of(ops, Shard(0, 2), 2, 4, ExpertSharing(1))
    layers.load(1, ops, lambda expert: ExpertWeights(torch.zeros(8, 4), torch.zeros(4, 4)))
    layers.counts[1] += 100  # by a rehearsal
    return layers, RankExperts(layers, lambda: moved.append("weights")), moved


def test_tokens_are_counted_by_expert_and_by_the_rank_that_had_them() -> None:
    layers, experts, moved = two_ranks()
    layers.counts[1, :, 0] += torch.tensor([5, 1, 2, 3])
    before = LayerLoad([5, 1, 2, 3], [[0, 1], [2, 3]], [6, 5])
    assert experts.load() == ExpertLoad({1: before})
    experts.place(1, ExpertPlacement(((0, 1, 3), (0, 2, 3))))
    layers.counts[1] += torch.tensor([[4, 3], [1, 0], [1, 0], [0, 2]])  # copies 0 and 1 of each
    now = experts.load().layers[1]
    assert now.counts == [12, 2, 3, 5]
    assert now.rank_tokens == [6 + 4 + 1, 5 + 3 + 1 + 2]
    assert [sorted(own) for own in now.ranks] == [[0, 1, 3], [0, 2, 3]]
    assert moved == ["weights"]


def test_a_layer_of_another_stage_is_not_its_business() -> None:
    _, experts, moved = two_ranks()
    experts.place(0, ExpertPlacement(((0, 1), (2, 3))))
    assert moved == []


def test_a_rank_alone_has_no_experts_to_move() -> None:
    ops = ReferenceOps()
    layers = ExpertLayers.of(ops, Shard(), 1, 2, ExpertSharing(0))
    layers.load(0, ops, lambda expert: ExpertWeights(torch.zeros(8, 4), torch.zeros(4, 4)))
    experts = RankExperts(layers)
    layers.counts[0, :, 0] += torch.tensor([3, 4])
    assert experts.redundant is None
    assert experts.load() == ExpertLoad({0: LayerLoad([3, 4], [], [])})


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b"{}", "has no tokens; record it under load"),
        (b"no json", "is no record of GET /v1/penstock/experts"),
        (b'{"layers": {"0": {"counts": "all"}}}', "is no record of GET /v1/penstock/experts"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_says_nothing_is_refused(written: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    if written is not None:
        path.write_bytes(written)
    with pytest.raises(ConfigError, match=told):
        read_expert_counts(str(path))


def test_counts_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_bytes(msgspec.json.encode(ExpertLoad({3: LayerLoad([1, 2], [[0], [1]], [1, 2])})))
    assert read_expert_counts(str(path)) == {3: [1, 2]}
