"""The leader's side of ranks that are not there: sockets at whose other end the test says what a rank would."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass

import pytest
import torch

from penstock.core.errors import ConfigError, EngineFailed, ModelMissing
from penstock.core.nodes import NodeMap
from penstock.core.parallelism import Parallelism
from penstock.core.ranks import RankLost, RankReading
from penstock.core.settings import EngineSettings
from penstock.link.connection import Connection
from penstock.model.lora import HostAdapter
from penstock.model.stages import Stage
from penstock.runner.limits import Limits
from penstock.runner.ranks.join import LoneStage, Place
from penstock.runner.ranks.leader import Follower, Leader
from penstock.runner.ranks.led import LedAdapters
from penstock.runner.ranks.messages import (
    AdapterRead,
    Alive,
    Chosen,
    EmbedTexts,
    FailedToStart,
    ForgetAdapter,
    Lost,
    ReadAdapter,
    Scores,
    Sized,
    Vectors,
    from_follower_decoder,
    to_follower_decoder,
)
from penstock.runner.size import EngineSize
from tests.waiting import eventually

NODES = NodeMap((1, 1, 1), ("10.0.0.1", "10.0.0.2", "10.0.0.3"))


@dataclass
class Process:
    """A process of another machine."""

    status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float = 0.0) -> int:
        if self.status is None:
            raise subprocess.TimeoutExpired("", timeout)
        return self.status

    def kill(self) -> None:
        """It is not there."""


class Ranks:
    """Two ranks that follow, each on a node of its own."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.said = [Connection(theirs, to_follower_decoder) for _, theirs in pairs]
        self.processes = [Process(), Process()]
        followers = [
            Follower(
                rank, self.processes[rank - 1], Connection(pairs[rank - 1][0], from_follower_decoder), NODES.where(rank)
            )
            for rank in (1, 2)
        ]
        place = Place(Parallelism(pp=3), NODES, LoneStage(), Stage(), torch.device("cpu"))
        self.leader = Leader(place, followers, EngineSettings(rank_timeout_s=60.0))
        self.lost: list[RankLost] = []


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def size(num_blocks: int) -> EngineSize:
    return EngineSize(
        Limits(block_size=16, max_num_seqs=8, chunk_tokens=64, max_model_len=1024), num_blocks, num_blocks * 100
    )


def test_all_have_as_many_blocks_as_the_one_with_least_room(ranks: Ranks) -> None:
    ranks.said[0].send(Sized(90, 5, 0, "float32"))
    ranks.said[1].send(Sized(70, 9, 0, "float32"))
    found = ranks.leader.agree(size(80), "float32")
    assert (found.num_blocks, found.kv_bytes) == (70, 7_000)
    assert ranks.said[0].receive(60.0).size.num_blocks == 70


def test_nodes_that_would_compute_in_other_formats_are_refused_by_name(ranks: Ranks) -> None:
    ranks.said[0].send(Sized(90, 0, 0, "bfloat16"))
    wanted = r"rank 1 \(node 1, 10.0.0.2\) would compute in bfloat16, and rank 0 in float32"
    with pytest.raises(ConfigError, match=wanted):
        ranks.leader.agree(size(80), "float32")


def test_ranks_that_would_place_experts_apart_are_refused(ranks: Ranks) -> None:
    """They have read different files of counts: tokens would be lost between them."""
    ranks.said[0].send(Sized(90, 0, 0, "float32", placement="ab"))
    with pytest.raises(ConfigError, match=r"rank 1 \(node 1, 10.0.0.2\) has read other expert_counts than rank 0"):
        ranks.leader.agree(size(80), "float32", "cd")


def test_a_rank_that_cannot_start_or_that_misses_another_says_so(ranks: Ranks) -> None:
    ranks.said[0].send(FailedToStart("model_missing", "there is no model"))
    with pytest.raises(Exception, match=r"rank 1 \(node 1, 10.0.0.2\): there is no model") as caught:
        ranks.leader.agree(size(80), "")
    assert type(caught.value).__name__ == "ModelMissing"
    ranks.said[0].send(Lost(2, "it did not come"))
    with pytest.raises(EngineFailed, match="rank 2 of the model is lost: it did not come"):
        ranks.leader.agree(size(80), "")


def test_a_rank_that_died_is_named_and_not_the_one_that_felt_it_first(ranks: Ranks) -> None:
    """Rank 1 notices in a collective that somebody is gone, and takes itself for the one that has lost touch."""
    ranks.said[0].send(Lost(1, "it lost touch with the others"))
    ranks.processes[1].status = -9
    ranks.said[1].close()
    ranks.leader.watch(ranks.lost.append)
    eventually(lambda: len(ranks.lost), lambda count: count == 2)
    for lost in ranks.lost:
        assert str(lost) == "rank 2 of the model (node 2, 10.0.0.3) is lost: its process was killed by SIGKILL"
    with pytest.raises(RankLost, match="rank 2"):
        ranks.leader.chosen()


def test_a_rank_that_lost_touch_is_named_where_nobody_has_died(ranks: Ranks) -> None:
    ranks.leader.watch(ranks.lost.append)
    ranks.said[1].send(Alive(0))
    ranks.said[0].send(Chosen([]))
    assert ranks.leader.chosen() == []
    ranks.said[0].send(Lost(1, "it lost touch with the others"))
    (lost,) = eventually(lambda: ranks.lost)
    assert str(lost) == "rank 1 of the model (node 1, 10.0.0.2) is lost: it lost touch with the others"


def test_a_rank_whose_call_failed_is_lost(ranks: Ranks) -> None:
    ranks.leader.watch(ranks.lost.append)
    ranks.said[0].send(FailedToStart("model_missing", "there is no adapter at /a"))
    (lost,) = eventually(lambda: ranks.lost)
    assert str(lost) == "rank 1 of the model (node 1, 10.0.0.2) is lost: there is no adapter at /a"


class OwnAdapters:
    """The first rank's own part, which it can always read."""

    num_slots = 1

    def read(self, path: str, digest: str) -> HostAdapter:
        return HostAdapter(digest, None, 0, 8)

    def keep(self, adapter: HostAdapter) -> None: ...

    def forget(self, digest: str) -> None: ...

    def clear(self, slot: int) -> None: ...


def test_an_adapter_that_one_rank_cannot_read_is_forgotten_by_all(ranks: Ranks) -> None:
    ranks.leader.watch(ranks.lost.append)
    adapters = LedAdapters(OwnAdapters(), ranks.leader)
    for said in ranks.said:
        said.send(AdapterRead("d"))
    assert adapters.read("/a", "d").digest == "d"
    ranks.said[0].send(AdapterRead("d"))
    ranks.said[1].send(AdapterRead("d", "model_missing", "there is no adapter directory /a"))
    with pytest.raises(ModelMissing, match=r"rank 2 \(node 2, 10.0.0.3\): there is no adapter directory /a"):
        adapters.read("/a", "d")
    for said in ranks.said:
        told = [said.receive(60.0) for _ in range(3)]
        assert told == [ReadAdapter("/a", "d"), ReadAdapter("/a", "d"), ForgetAdapter("d")]
    assert not ranks.lost


def test_nobody_waits_for_what_a_lost_rank_would_have_answered(ranks: Ranks) -> None:
    ranks.leader.watch(ranks.lost.append)
    ranks.said[1].send(Vectors([b"v"]))
    ranks.said[1].send(Scores([0.5]))
    assert (ranks.leader.vectors(), ranks.leader.scores()) == ([b"v"], [0.5])
    ranks.said[1].send(Lost(2, "it lost touch with the others"))
    for wait in (ranks.leader.vectors, ranks.leader.scores, ranks.leader.adapter_errors):
        with pytest.raises(RankLost, match="rank 2"):
            wait()


def test_a_rank_whose_call_is_long_is_lost_only_when_it_stands_still(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in many parts. The clock goes on by 50 s with every reading, and a rank has 60."""
    readings: list[RankReading] = []
    monkeypatch.setattr("penstock.runner.ranks.leader.monotonic", lambda: 50.0 * len(readings))
    ranks.leader.tell(EmbedTexts([[1, 2, 3]]))
    ranks.leader.watch(ranks.lost.append, readings.append)
    for num_parts in range(4):
        ranks.said[1].send(Alive(0, num_parts=num_parts))
    eventually(lambda: len(readings), lambda count: count == 4)
    for _ in range(2):
        assert not ranks.lost
        ranks.said[1].send(Alive(0, num_parts=3))
    (lost,) = eventually(lambda: ranks.lost)
    assert str(lost) == "rank 2 of the model (node 2, 10.0.0.3) is lost: it has hung in a step for 60 s"
