"""Nodes of a replica: their ranks, and the variables that say which one this is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.nodes import MASTER_PORT, Nodes, fewest_nodes, nodes_of, parse_address, spread, with_nodes
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings

LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "m-0.m.default"}
TORCH = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "2345"}


@pytest.mark.parametrize(
    ("tp", "pp", "nodes", "sizes"),
    [
        (2, 2, 2, (2, 2)),  # a stage on each
        (2, 1, 2, (1, 1)),  # a stage over both
        (1, 2, 2, (1, 1)),
        (4, 2, 4, (2, 2, 2, 2)),  # two nodes for a stage
        (1, 3, 2, (1, 2)),  # fewer stages where the server is
        (2, 5, 3, (2, 4, 4)),
        (8, 1, 1, (8,)),
    ],
)
def test_a_stage_stays_on_one_node_where_it_fits(tp: int, pp: int, nodes: int, sizes: tuple[int, ...]) -> None:
    assert spread(Parallelism(tp, pp), nodes).sizes == sizes


@pytest.mark.parametrize(("tp", "pp", "nodes"), [(1, 1, 2), (3, 1, 2), (2, 2, 3), (1, 2, 4)])
def test_what_cannot_be_spread_is_refused(tp: int, pp: int, nodes: int) -> None:
    with pytest.raises(ConfigError, match=f"over {nodes} nodes"):
        spread(Parallelism(tp, pp), nodes)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_every_rank_is_on_one_node_and_every_node_has_one(tp: int, pp: int, nodes: int) -> None:
    try:
        found = spread(Parallelism(tp, pp), nodes)
    except ConfigError:
        assert nodes > pp
        return
    assert [rank for node in range(nodes) for rank in found.ranks_of(node)] == [*range(tp * pp)]
    assert all(found.node_of(rank) == node for node in range(nodes) for rank in found.ranks_of(node))
    stages = [range(tp * stage, tp * (stage + 1)) for stage in range(pp)]
    assert any(found.spans(stage) for stage in stages) == (nodes > pp)


@pytest.mark.parametrize(
    ("tp", "pp", "per_node", "sizes"),
    [
        (8, 1, 8, (8,)),
        (8, 2, 8, (8, 8)),
        (16, 1, 8, (8, 8)),
        (3, 5, 8, (3, 6, 6)),  # two nodes would have nine of them on one
        (5, 1, 3, (1,) * 5),  # five cannot be halved
    ],
)
def test_as_few_nodes_are_taken_as_have_room(tp: int, pp: int, per_node: int, sizes: tuple[int, ...]) -> None:
    assert fewest_nodes(Parallelism(tp, pp), per_node).sizes == sizes


def test_flags_say_all() -> None:
    settings = EngineSettings(nnodes=2, node_rank=0, master_addr="10.0.0.7")
    assert nodes_of(settings, {}) == Nodes(2, 0, "10.0.0.7", MASTER_PORT, "by nnodes, node_rank, master_addr")
    assert nodes_of(settings, LWS).host == "10.0.0.7"


def test_one_node_is_the_rule() -> None:
    assert nodes_of(EngineSettings(), {}) == Nodes()
    assert nodes_of(EngineSettings(nnodes=1), LWS) == Nodes()
    assert nodes_of(EngineSettings(), LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}) == Nodes()
    assert nodes_of(EngineSettings(), {"WORLD_SIZE": "2"}) == Nodes()  # somebody's else


def test_leader_worker_sets_variables_fill_what_is_unset() -> None:
    found = nodes_of(EngineSettings(), LWS)
    assert (found.count, found.rank, found.address) == (2, 1, f"m-0.m.default:{MASTER_PORT}")
    assert found.source == "by LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS"
    mixed = nodes_of(EngineSettings(master_addr="leader:7"), LWS)
    assert (mixed.rank, mixed.address) == (1, "leader:7")
    assert mixed.source.startswith("by master_addr; by LWS_")
    assert nodes_of(EngineSettings(), TORCH | LWS).host == "m-0.m.default"


def test_torchruns_variables_fill_what_is_unset() -> None:
    found = nodes_of(EngineSettings(), TORCH)
    assert (found.count, found.rank, found.address) == (2, 1, "10.0.0.7:2345")
    started = TORCH | {
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    found = nodes_of(EngineSettings(), started)
    assert (found.rank, found.address) == (1, "10.0.0.7:2346")  # torchrun has the port itself
    with pytest.raises(ConfigError, match="--nproc-per-node is 1"):
        nodes_of(EngineSettings(), started | {"LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK in the environment is 'x'"):
        nodes_of(EngineSettings(), TORCH | {"RANK": "x"})


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (EngineSettings(nnodes=2), "node_rank"),
        (EngineSettings(nnodes=2, node_rank=1), "master_addr"),
        (EngineSettings(node_rank=1), "nnodes"),
        (EngineSettings(nnodes=2, node_rank=2, master_addr="a"), "node_rank"),
    ],
)
def test_what_is_missing_is_named(settings: EngineSettings, missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        nodes_of(settings, {})
    assert caught.value.param == missing


def test_settings_are_complete_for_processes_that_are_started_with_them() -> None:
    found = nodes_of(EngineSettings(), LWS)
    again = nodes_of(with_nodes(EngineSettings(), found), {})
    assert (again.count, again.rank, again.address) == (found.count, found.rank, found.address)
    assert nodes_of(with_nodes(EngineSettings(), Nodes()), LWS) == Nodes()


@pytest.mark.parametrize(
    ("text", "address"),
    [("a", ("a", 5)), ("a:7", ("a", 7)), ("::1", ("::1", 5)), ("[::1]", ("::1", 5)), ("[::1]:7", ("::1", 7))],
)
def test_an_address_has_a_port_or_the_usual_one(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, 5) == address


@pytest.mark.parametrize("text", ["", ":7", "a:x", "a:0", "a:70000", "[::1", "[::1]7"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        parse_address(text, 5)
