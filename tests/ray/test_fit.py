"""Reasons why Ray has no node for a replica."""

from __future__ import annotations

import pytest

from penstock.fleet.drivers.ray_cluster import NodeView
from penstock.fleet.drivers.ray_fit import explain_lack, have_room

NODES = [
    NodeView("one", "192.0.2.1", {"CPU": 8.0, "GPU": 2.0, "zone:a": 1000.0}),
    NodeView("two", "192.0.2.2", {"CPU": 4.0, "GPU": 4.0, "zone:b": 1000.0, "big": 1.0}),
    NodeView("three", "192.0.2.3", {"CPU": 64.0, "zone:c": 1000.0}),
    NodeView("gone", "192.0.2.4", {"CPU": 64.0, "GPU": 8.0}, is_alive=False),
    NodeView("going", "192.0.2.5", {"CPU": 64.0, "GPU": 8.0}, drains_at=0.0),
]


@pytest.mark.parametrize(
    ("bundle", "why"),
    [
        ({"CPU": 1, "GPU": 2}, "the nodes that have so much are full"),
        (
            {"CPU": 1, "GPU": 8},
            "a replica is on one node, and none has more than 4 GPUs: `gpus: 4` would fit, or add a node with 8",
        ),
        (
            {"CPU": 1, "GPU": 4, "zone:a": 0.001},
            "a replica is on one node, and none of those with zone:a has more than 2 GPUs: "
            "`gpus: 2` would fit, or add a node with 4",
        ),
        ({"GPU": 1, "zone:c": 0.001}, "no node of those with zone:c has GPUs: `gpus: 0` runs on CPUs"),
        (
            {"CPU": 100},
            "a replica is on one node, and none has more than 64 CPUs: `ray: {cpus: 64}` would fit, "
            "or add a node with 100",
        ),
        ({"CPU": 16, "GPU": 1}, "no node has its CPUs and its GPUs together"),
        ({"CPU": 1, "zone:x": 0.001}, "no node has the resource zone:x: see `ray start --resources`"),
        ({"CPU": 1, "zone:a": 0.001, "big": 1}, "no node has all of zone:a, big: see `ray start --resources`"),
    ],
)
def test_a_lack_says_what_would_work(bundle: dict[str, float], why: str) -> None:
    assert explain_lack([bundle], NODES) == why


def test_a_cluster_without_a_node_that_takes_work_is_told() -> None:
    assert explain_lack([{"CPU": 1}], NODES[3:]) == "no node is alive and takes new work"


@pytest.mark.parametrize(
    ("bundles", "why"),
    [
        ([{"GPU": 2}, {"GPU": 2}], "the nodes that have so much are full"),
        ([{"GPU": 4}, {"GPU": 2}], "the nodes that have so much are full"),
        ([{"GPU": 4}, {"GPU": 4}], "a replica is on 2 nodes, and 1 node has GPU 4: add 1"),
        ([{"GPU": 2}] * 3, "a replica is on 3 nodes, and 2 nodes have GPU 2: add 1"),
        ([{"GPU": 8}] * 2, "no node has GPU 8: more `nodes` need less of each, or add nodes with so much"),
    ],
)
def test_a_lack_of_several_nodes_says_what_would_work(bundles: list[dict[str, float]], why: str) -> None:
    assert explain_lack(bundles, NODES) == why
    assert have_room(bundles, NODES) == ("full" in why)
