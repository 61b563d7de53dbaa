"""Ranks of one model on several nodes: real processes, real sockets, each node at a loopback address of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from penstock.core.errors import ModelMissing
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
from tests.model.family_configs import SHAPE
from tests.parallel.beside_steps import make_adapters, read_and_keep, take_turns
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
def group(
    parallelism: Parallelism, num_nodes: int, *, config: ModelConfig = CONFIG, max_loras: int = 0, **other: object
) -> Iterator[Group]:
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
            max_loras=max_loras,
            tp=parallelism.tp,
            pp=parallelism.pp,
            sp=parallelism.sp,
            **other,  # type: ignore[arg-type]
        )
        nodes = Nodes(num_nodes, 0, "127.0.0.1", reserved.getsockname()[1])
        identity = group_identity(RandomCheckpoint(config), settings, parallelism, nodes)
        said: list[str] = []
        agents = [
            NodeAgent(
                replace(nodes, rank=number),
                identity,
                config,
                replace(settings, node_host=f"127.0.0.{number + 1}"),
                said.append,
            )
            for number in range(num_nodes - 1, 0, -1)
        ]
        threads = [threading.Thread(target=agent.run) for agent in agents]
        for thread in threads:
            thread.start()
        leader = start_followers(config, config, settings, identity, nodes)
        lost: list[RankLost] = []
        assembly = assemble(RandomCheckpoint(config), settings, lambda *_: None, group=leader)
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


def test_a_rank_that_is_stopped_on_another_node_is_named() -> None:
    """It is silent, and closes nothing."""
    others = psutil.Process().children()  # of other tests
    with group(Parallelism(tp=2), 2, rank_timeout_s=10.0) as found:
        (rank,) = (child for child in psutil.Process().children() if child not in others)
        rank.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"rank 1 of the model \(node 1, 127\.0\.0\.2\) is lost: "):
            serve(found.assembly, Clients(Traffic(LIMITS, lambda turns: turns >= NUM_TURNS, seed=0)), num_blocks=40)


@pytest.mark.parametrize("parallelism", [Parallelism(tp=2), Parallelism(pp=2)], ids=["tp=2", "pp=2"])
def test_adapters_are_read_at_the_same_path_on_every_node(parallelism: Parallelism, tmp_path: Path) -> None:
    adapted = make_adapters(tmp_path)
    held = os.open(tmp_path, os.O_DIRECTORY)  # so they lie at a path that no other process has
    with forked(), group(parallelism, 2, config=SHAPE, max_loras=1) as found:
        with pytest.raises(ModelMissing, match=r"rank 1 \(node 1, 127\.0\.0\.2\): there is no adapter directory"):
            read_and_keep(found.assembly, Path(f"/proc/self/fd/{held}/1"))
        take_turns(found.assembly, adapted)
        assert not found.lost
    os.close(held)
