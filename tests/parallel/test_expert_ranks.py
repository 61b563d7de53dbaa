"""Experts that are counted, replicated and moved among ranks, which are processes: every token is one that the
reference might have chosen, before, while and after experts move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.expert_load import ExpertLoad, LayerLoad
from penstock.core.expert_placement import balanced_placement
from penstock.engine.messages import RebalanceExperts, Submit, ToEngine
from penstock.model.random_weights import RandomCheckpoint
from tests.parallel.test_layouts import FAMILIES, requests, served
from tests.runner.clients import Clients, serve
from tests.runner.devices import assembled
from tests.runner.judge import Judge

pytestmark = pytest.mark.slow

NUM_BLOCKS = 64
DRILL = pytest.mark.drill


def rebalancing(family: str) -> Clients:
    """A request before every other step, and experts that move meanwhile, three times."""

    def script(_: Clients) -> Iterator[list[ToEngine]]:
        for number, request in enumerate(requests(FAMILIES[family])):
            yield [Submit(request)]
            yield [RebalanceExperts()] if number in (2, 5, 8) else []

    return Clients(script)


def rebalanced(family: str, device: str, *, block_size: int) -> ExpertLoad:
    """All requests, with experts that move, and every token held to the reference."""
    config = FAMILIES[family]
    assembly = assembled(config, device, block_size=block_size, max_num_seqs=6, chunk_tokens=16)
    assert assembly.experts is not None
    clients = rebalancing(family)
    serve(assembly, clients, num_blocks=NUM_BLOCKS)
    assert len(clients.finished) == 12
    Judge(RandomCheckpoint(config), longest=64, device=assembly.device.name).check_all(clients)
    assert [answer.code for answer in clients.rebalanced] == [""] * 3
    assert clients.rebalanced[0].num_layers > 0
    assert all(answer.after <= answer.before for answer in clients.rebalanced)
    load = assembly.experts.load()
    assert sum(load.tokens_by_rank.values()) == load.num_tokens > 0
    own = {sum(layer.counts) for layer in load.layers.values() if layer.first_rank == 0}
    assert len(own) == 1, "every layer has the same tokens"
    return load


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "tp=2 ep=2 redundant_experts=1"),
        pytest.param("qwen2-moe", "tp=2 ep=2 redundant_experts=3", marks=DRILL),
        pytest.param("qwen3-moe", "tp=4 ep=4 redundant_experts=2", marks=DRILL),
        pytest.param("qwen3-moe", "tp=2 ep=2", marks=DRILL),
    ],
)
def test_experts_move_while_tokens_are_made(family: str, layout: str) -> None:
    load = rebalanced(family, f"cpu {layout}", block_size=4)
    experts = FAMILIES[family].experts
    assert experts is not None
    if "redundant" in layout:
        share = {layer: experts.count // len(found.ranks) for layer, found in load.layers.items()}
        assert any(len(own) > share[layer] for layer, found in load.layers.items() for own in found.ranks)


@DRILL
def test_experts_of_every_stage_can_be_moved() -> None:
    config, layout = FAMILIES["mixtral"], "tp=2 pp=2 ep=2 redundant_experts=1"
    assembly = assembled(config, f"cpu {layout}", block_size=4, max_num_seqs=6, chunk_tokens=16)
    assert assembly.experts is not None
    for layer in (0, 1):
        assembly.experts.place(layer, balanced_placement([9, 0, 0, 3, 0, 0, 0, 5], 2, 1))
    served(config, f"cpu {layout}", num_blocks=NUM_BLOCKS)


def test_recorded_counts_place_experts_at_the_start(tmp_path: Path) -> None:
    """As they are recorded from one engine, they say where the experts of the next are."""
    hot = [400, 300, 1, 2, 3, 1, 90, 0]
    path = tmp_path / "counts.json"
    path.write_bytes(msgspec.json.encode(ExpertLoad({layer: LayerLoad(hot) for layer in (0, 1)})))
    device = f"cpu tp=2 ep=2 redundant_experts=1 expert_counts={path}"
    served(FAMILIES["mixtral"], device, num_blocks=NUM_BLOCKS)
    experts = assembled(FAMILIES["mixtral"], device, block_size=4, max_num_seqs=6, chunk_tokens=16).experts
    assert experts is not None
    ranks = [list(own) for own in balanced_placement(hot, 2, 1).ranks]
    assert [layer.ranks for layer in experts.load().layers.values()] == [ranks] * 2


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("tp=2 redundant_experts=1", "it needs ep"),
        ("tp=2 ep=2 redundant_experts=5", "a rank that has 4 more has all of them"),
        ("tp=2 ep=2 expert_counts=/nowhere", "/nowhere cannot be read: No such file"),
    ],
)
def test_what_cannot_be_placed_is_refused(wanted: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        assembled(FAMILIES["mixtral"], f"cpu {wanted}", block_size=4)
