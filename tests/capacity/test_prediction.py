"""Predictions for replicas of several GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.capacity.demand import Demand, Target
from penstock.capacity.hardware import NETWORKS, Gpu, hardware
from penstock.capacity.plan import Case, Setup
from penstock.capacity.prediction import Prediction, check_count, predict, predictions
from penstock.capacity.shapes import SHAPES
from penstock.core.errors import ConfigError
from penstock.core.parallelism import Parallelism

TABLE = hardware()
H200 = TABLE["h200"]
CHAT = Demand(1.0, ((512, 256),), target=Target(0.5, 0.1))


def found(shape: str, num_gpus: int, *gpus: Gpu) -> dict[tuple[str, str], Prediction]:
    case = Case(SHAPES[shape], CHAT, TABLE, engine="penstock")
    listed = list(predictions(case, Setup("h200"), num_gpus, gpus or [H200]))
    named = {(each.parallelism.short, each.over): each for each in listed}
    assert len(named) == len(listed), "each is told once"
    return named


def test_parts_of_the_gpus_are_told_by_width_and_all_of_them_in_every_way() -> None:
    told = found("llama8b", 8)
    assert [name for name, _ in told] == ["TP1", "TP2", "TP4", "TP8", "TP4 PP2", "TP2 PP4", "TP1 PP8"]
    assert [each.num_replicas for each in told.values()] == [8, 4, 2, 1, 1, 1, 1]
    mixture = [name for name, _ in found("mixtral-8x7b", 4)]
    assert mixture == ["TP1", "TP2", "TP2 EP2", "TP4", "TP4 EP4", "TP2 PP2", "TP2 PP2 EP2", "TP1 PP4"]


def test_what_does_not_fit_has_no_steps() -> None:
    told = found("llama70b", 2)
    alone, two = told["TP1", ""], told["TP2", "NVLink"]
    assert (alone.steps, alone.expected, alone.rate) == (None, None, 0.0)
    assert two.steps is not None
    assert two.memory.weight_bytes < alone.memory.weight_bytes


def test_wider_and_faster_links_are_predicted_to_be_faster_and_slower_ones_to_wait_for_more() -> None:
    told = found("llama70b", 8, H200, H200.over_pcie())
    for link in ("NVLink", "PCIe"):
        steps = [told[f"TP{tp}", link].steps for tp in (2, 4, 8)]
        assert all(each is not None for each in steps)
        batches = [each.batch_s for each in steps if each]
        assert batches == sorted(batches, reverse=True)
        shares = [each.batch_share for each in steps if each]
        assert shares == sorted(shares)
    for tp in (2, 4, 8):
        fast, slow = (told[f"TP{tp}", link] for link in ("NVLink", "PCIe"))
        assert fast.steps is not None
        assert slow.steps is not None
        assert fast.steps.prompt_share < slow.steps.prompt_share
        assert fast.rate > slow.rate


def test_two_nodes_are_named_and_a_pipeline_crosses_them_for_less_than_sums_do() -> None:
    networks = [H200.over(each) for each in NETWORKS.values()]
    told = found("llama70b", 16, *networks)
    inside = [each for (_, over), each in told.items() if "nodes" not in over]
    assert {each.num_nodes for each in inside} == {1}
    for network in ("InfiniBand 400 Gb/s", "100 GbE"):
        sums = told["TP16 SP2", f"NVLink, 2 nodes by {network}"]
        pipe = told["TP8 PP2", f"NVLink, 2 nodes by {network}"]
        assert sums.steps is not None
        assert pipe.steps is not None
        assert sums.num_nodes == pipe.num_nodes == 2
        assert sums.steps.batch_share > pipe.steps.batch_share
        assert pipe.rate > sums.rate
    fast, slow = (told["TP16 SP2", f"NVLink, 2 nodes by {each.name}"] for each in NETWORKS.values())
    assert fast.rate > slow.rate


def test_the_wait_of_a_step_is_its_exchanges() -> None:
    """One stage boundary between nodes, and every number by hand: 80 layers, hidden 8,192, bf16."""
    case = Case(SHAPES["llama70b"], CHAT, {"h200": replace(H200, per_node=1)}, engine="penstock")
    told = predict(case, Setup("h200"), Parallelism(pp=2))
    assert told.over == "2 nodes by InfiniBand 400 Gb/s"
    assert told.steps is not None
    per_s = 0.89 * 50e9
    waits_s = 20e-6 + 8192 * 8192 * 2 / per_s
    assert told.steps.prompt_share * told.steps.prompt_s == pytest.approx(waits_s)
    sums = predict(case, Setup("h200"), Parallelism(tp=2))
    assert sums.steps is not None
    waits_s = (2 * 80 + 2) * 20e-6 + 8192 * (2 * 80 + 1) * 8192 * 2 / per_s  # one GPU a node: no sum within it
    assert sums.steps.prompt_share * sums.steps.prompt_s == pytest.approx(waits_s)


def test_gpus_that_cannot_be_shared_out_among_nodes_are_refused() -> None:
    for num_gpus, num_nodes, param in ((0, 1, "gpus"), (8, 3, "nodes"), (8, 0, "nodes")):
        with pytest.raises(ConfigError) as refused:
            check_count(num_gpus, num_nodes)
        assert refused.value.param == param
