"""Ranks of one model on several nodes: real processes, real sockets, each node at a loopback address of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import pytest

from penstock.core.model_config import ModelConfig
from penstock.core.nodes import Nodes, spread
from penstock.core.parallelism import Parallelism
from penstock.core.ranks import RankLost
from penstock.core.settings import EngineSettings
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import assemble
from penstock.runner.assembly import Assembly
from penstock.runner.ranks.gathering import bind_here
from penstock.runner.ranks.identity import group_identity
from penstock.runner.ranks.leader import Leader, start_followers
from penstock.runner.ranks.led import led
from penstock.runner.ranks.node_agent import NodeAgent
from tests.equality.inprocess import soiled
from tests.runner.clients import Clients, serve
from tests.runner.judge import Judge
from tests.runner.traffic import Limits, Traffic
from tests.template import forked
from tests.waiting import eventually

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=256,
)
LIMITS = Limits(128, max_model_len=256, prefix_len=120, tail_len=20, max_tokens=30, most_open=24)
NUM_TURNS = 150


@dataclass
class Group:
    """A leader in this process, and agents of the other nodes in its threads; their ranks are processes."""

    assembly: Assembly
    leader: Leader
    lost: list[RankLost]
    said: list[str]  # by agents


@contextmanager
def group(parallelism: Parallelism, num_nodes: int, **other: object) -> Iterator[Group]:
    with bind_here("127.0.0.1", 0, or_anywhere=False) as reserved:  # stays ours, and never listens
        settings = EngineSettings(
            device="cpu",
            dtype="float32",
            quant="none",
            load="dummy",
            block_size=16,
            max_num_seqs=8,
            chunk_tokens=48,
            threads=1,
            max_loras=0,
            tp=parallelism.tp,
            pp=parallelism.pp,
            sp=parallelism.sp,
            **other,  # type: ignore[arg-type]
        )
        nodes = Nodes(num_nodes, 0, "127.0.0.1", reserved.getsockname()[1])
        identity = group_identity(RandomCheckpoint(CONFIG), settings, parallelism, nodes)
        said: list[str] = []
        agents = [
            NodeAgent(
                replace(nodes, rank=number),
                identity,
                CONFIG,
                replace(settings, node_host=f"127.0.0.{number + 1}"),
                said.append,
            )
            for number in range(num_nodes - 1, 0, -1)
        ]
        threads = [threading.Thread(target=agent.run) for agent in agents]
        for thread in threads:
            thread.start()
        leader = start_followers(CONFIG, CONFIG, settings, identity, nodes)
        lost: list[RankLost] = []
        assembly = assemble(RandomCheckpoint(CONFIG), settings, lambda *_: None, group=leader)
        leader.started()
        leader.watch(lost.append)
        soiled(assembly.rank_runner._kv)  # type: ignore[attr-defined]
        try:
            yield Group(led(assembly, leader, parallelism), leader, lost, said)
        finally:
            for agent in agents:
                agent.leave(0.0)
            leader.close()
            for thread in threads:
                thread.join()


def check_answers(found: Group) -> None:
    """Random traffic: greedy and sampled tokens, prefixes, preemption, aborts; as the model in one process has them."""
    clients = Clients(Traffic(LIMITS, lambda turns: turns >= NUM_TURNS, seed=0))
    serve(found.assembly, clients, num_blocks=40)
    assert len(clients.finished) > 10
    Judge(RandomCheckpoint(CONFIG), longest=CONFIG.context_length, device="cpu").check_all(clients)
    assert not found.lost


def test_a_stage_over_two_nodes_says_what_one_process_would_and_names_the_rank_that_is_killed() -> None:
    others = psutil.Process().children()  # of other tests
    with group(Parallelism(tp=2), 2) as found:
        check_answers(found)
        (rank,) = (child for child in psutil.Process().children() if child not in others)
        rank.kill()
        (lost,) = eventually(lambda: found.lost)
        assert str(lost) == "rank 1 of the model (node 1, 127.0.0.2) is lost: its process was killed by SIGKILL"
        with pytest.raises(RankLost):
            serve(found.assembly, Clients(Traffic(LIMITS, lambda turns: turns >= NUM_TURNS, seed=0)), num_blocks=40)


def test_ranks_that_share_out_tokens_may_be_on_two_nodes() -> None:
    with forked(), group(Parallelism(tp=2, sp=2), 2) as found:
        check_answers(found)


def test_a_pipeline_over_three_nodes_says_what_one_process_would() -> None:
    with forked(), group(Parallelism(pp=3), 3) as found:
        check_answers(found)


def test_stages_of_two_ranks_on_a_node_each_say_what_one_process_would() -> None:
    with forked(), group(Parallelism(tp=2, pp=2), 2) as found:
        assert spread(Parallelism(tp=2, pp=2), 2).sizes == (2, 2)
        check_answers(found)
        assert "node 1 starts ranks 2 to 3" in "".join(found.said)
