"""Nodes that meet their leader, on loopback and in threads: who is let in, who is refused, and in which words."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError, EngineFailed, EngineUnavailable
from penstock.core.nodes import Nodes, spread
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings
from penstock.link.connection import Connection, Disconnected, read_exactly
from penstock.link.proof import Refused
from penstock.runner.ranks import handshake
from penstock.runner.ranks.gathering import Gathered, Gathering, JoinedNode, RemoteProcess, bind_here, secret_of
from penstock.runner.ranks.handshake import dial
from penstock.runner.ranks.messages import (
    Begin,
    GroupIdentity,
    LinkHello,
    NodeAlive,
    NodeHello,
    RankEnded,
    RankHello,
    begin_decoder,
)
from penstock.runner.ranks.node_agent import NodeAgent
from tests.waiting import eventually

PARALLELISM = Parallelism(tp=1, pp=2)
IDENTITY = GroupIdentity(
    2, PARALLELISM, {"tp": 1, "pp": 2}, "shape", {"a.safetensors": "1"}, {"dtype": "float32", "quant": "none"}
)
SETTINGS = EngineSettings(rank_timeout_s=600.0, node_timeout_s=60.0)


class Leader:
    """A leader that waits in a thread."""

    def __init__(self, settings: EngineSettings = SETTINGS) -> None:
        self._reserved = bind_here("127.0.0.1", 0, or_anywhere=False)  # never listens; see `cli.replicas`
        self.nodes = Nodes(2, 0, "127.0.0.1", self._reserved.getsockname()[1])
        self.gathering = Gathering(self.nodes, spread(PARALLELISM, 2), IDENTITY, settings)
        self.address = (self.nodes.host, self.nodes.port)
        self.gathered: Future[Gathered] = Future()
        threading.Thread(target=self._gather, args=(settings,), daemon=True).start()

    def _gather(self, settings: EngineSettings) -> None:
        try:
            self.gathered.set_result(self.gathering.gather(0, settings))
        except EngineFailed as error:
            self.gathered.set_exception(error)

    def close(self) -> None:
        self.gathering.close()
        self._reserved.close()

    def dial(self, hello: NodeHello | RankHello | LinkHello, secret: bytes = b"s") -> socket.socket:
        return dial(self.address, hello, secret, 30.0)

    def join(self, secret: bytes = b"s", **other: object) -> socket.socket:
        return self.dial(NodeHello(1, 1, replaced(**other)), secret)


def replaced(**other: object) -> GroupIdentity:
    fields = {name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__}
    return GroupIdentity(**(fields | other))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RANKS_SECRET", "s")


@pytest.fixture
def leader() -> Iterator[Leader]:
    found = Leader()
    yield found
    found.close()


def begin(sock: socket.socket) -> Begin:
    found = Connection(sock, begin_decoder).receive(60.0)
    assert isinstance(found, Begin)
    return found


def complete(leader: Leader, node: socket.socket) -> Gathered:
    """The node does what it is told."""
    told = begin(node)
    leader.dial(RankHello(told.session, 1))
    leader.dial(LinkHello(told.session, 0))
    return leader.gathered.result(60.0)


def test_a_node_is_welcome_and_told_to_begin(leader: Leader) -> None:
    found = complete(leader, leader.join())
    assert found.nodes.hosts == ("127.0.0.1", "127.0.0.1")
    assert (found.controls.keys(), found.links.keys()) == ({1}, {0})
    with pytest.raises(OSError, match="refused"):
        leader.join()  # nobody is waited for any more


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"asked": {"tp": 2, "pp": 1}},
            "tp is 1 at the leader and 2 on node 1; pp is 2 at the leader and 1",
        ),
        ({"asked": {"pp": 2, "ep": 2, "sp": 2}}, "ep is 1 at the leader and 2 on node 1; sp is 1 at the leader and 2"),
        ({"num_nodes": 3}, "nnodes is 2 at the leader and 3 on node 1"),
        ({"formats": {"dtype": "float32", "quant": "int8"}}, "quant is none at the leader and int8 on node 1"),
        ({"config": "another"}, "the model's shape on node 1 is not the leader's"),
        ({"files": {"a.safetensors": "2"}}, "weights on node 1 are not the leader's: a.safetensors"),
    ],
)
def test_a_mismatch_is_refused_by_name_on_both_sides_and_the_right_node_is_waited_for(
    leader: Leader, caplog: pytest.LogCaptureFixture, other: dict[str, object], words: str
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(Refused) as refused:
        leader.join(**other)
    assert words in refused.value.reason
    assert refused.value.is_final
    assert f"node 1 at 127.0.0.1 is refused: {refused.value.reason}" in caplog.text
    complete(leader, leader.join())


def test_a_node_that_leaves_to_the_leader_what_is_auto_is_welcome(leader: Leader) -> None:
    complete(leader, leader.join(asked={}, parallelism=Parallelism()))


def test_who_has_another_secret_is_refused(leader: Leader, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Refused, match="another secret") as refused:
        leader.join(secret=b"other")
    assert refused.value.is_final
    eventually(lambda: caplog.text, lambda text: "127.0.0.1 is refused: it has another secret" in text)
    complete(leader, leader.join())


def test_another_version_or_protocol_is_refused_by_name(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = socket.create_connection(leader.address)
    preamble = struct.Struct("<8sI32s32s")
    there.sendall(preamble.pack(b"PENSTOCK", 999, b"9.9.9", bytes(32)))
    eventually(lambda: caplog.text, lambda text: "penstock '9.9.9' (protocol 999) there" in text)
    there.close()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(dial, server.getsockname(), NodeHello(1, 1, IDENTITY), b"s", 30.0)
        called, _ = server.accept()
        called.sendall(preamble.pack(b"PENSTOCK", handshake.PROTOCOL + 1, b"9.9.9", bytes(32)))
        with pytest.raises(Refused, match=rf"penstock '9.9.9' \(protocol {handshake.PROTOCOL + 1}\) there"):
            calling.result(60.0)
        called.close()


def test_a_leader_that_only_says_it_knows_the_secret_is_refused() -> None:
    preamble = struct.Struct("<8sI32s32s")
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(dial, server.getsockname(), NodeHello(1, 1, IDENTITY), b"s", 30.0)
        called, _ = server.accept()
        hello = called.recv(preamble.size, socket.MSG_WAITALL)
        called.sendall(hello)  # its own words, and later its own proof
        proof = called.recv(32, socket.MSG_WAITALL)
        called.sendall(b"\0" + proof)
        with pytest.raises(Refused, match="does not know the secret"):
            calling.result(60.0)
        called.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + bytes(200), b"", b"PENSTOCK"])
def test_strangers_are_in_nobodys_way(leader: Leader, noise: bytes) -> None:
    strangers = [socket.create_connection(leader.address) for _ in range(5)]
    for stranger in strangers:
        stranger.sendall(noise)
    complete(leader, leader.join())
    for stranger in strangers:
        stranger.close()


def test_a_length_that_no_message_has_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(struct.pack("<Q", 1 << 40))
        with pytest.raises(Disconnected):
            Connection(ours, begin_decoder).receive(60.0)
        theirs.sendall(struct.pack("<Q", 3) + b"\xc1\xc1\xc1")
        with pytest.raises(Disconnected):
            Connection(ours, begin_decoder).receive(60.0)
    ours.close()


def test_a_machine_that_the_kernel_gives_up_is_disconnected_and_a_slow_one_is_not() -> None:
    class Unplugged:
        def recv_into(self, view: memoryview) -> int:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    with pytest.raises(Disconnected):
        read_exactly(Unplugged(), 1)  # type: ignore[arg-type]
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        Connection(ours, begin_decoder).receive(0.001)


def test_a_node_that_has_gone_may_come_again_but_not_twice(leader: Leader) -> None:
    first = leader.join()
    with pytest.raises(Refused, match=r"node 1 is here already, at 127\.0\.0\.1") as refused:
        leader.join()
    assert not refused.value.is_final  # the first may be one that nobody has noticed to be gone
    first.close()

    def joined() -> socket.socket | None:
        try:
            return leader.join()
        except Refused:
            return None

    again = eventually(joined)
    assert again is not None
    complete(leader, again)


def test_a_node_that_goes_before_its_ranks_have_started_is_waited_for_anew(leader: Leader) -> None:
    first = leader.join()
    begin(first)
    first.close()

    def joined() -> socket.socket | None:
        try:
            return leader.join()
        except Refused:
            return None

    again = eventually(joined)
    assert again is not None
    complete(leader, again)


def test_a_node_that_comes_in_the_place_of_one_that_went_is_not_dropped_with_it(leader: Leader) -> None:
    first = leader.join()
    begin(first)
    gathering = leader.gathering
    with gathering._changed:  # the leader's thread has not seen yet that the first is gone
        first.close()
        (gone,) = gathering._joined.values()
        eventually(lambda: gone.gone)
        gathering._joined.clear()
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs, ours = socket.create_connection(server.getsockname()), server.accept()[0]
        newcomer = JoinedNode(
            NodeHello(1, 1, IDENTITY), Connection(ours, begin_decoder), "127.0.0.1", 60.0, lambda: None
        )
        gathering._joined[1] = newcomer
    told = begin(theirs)
    assert told.session == gathering._session
    assert not newcomer.gone


def test_a_node_that_says_nothing_is_gone_and_its_ranks_with_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node, rank = (socket.create_connection(server.getsockname()) for _ in range(2))
        ours, control = (server.accept()[0] for _ in range(2))
    told = threading.Event()
    joined = JoinedNode(NodeHello(1, 1, IDENTITY), Connection(ours, begin_decoder), "127.0.0.2", 0.01, told.set)
    joined.hold(control)
    eventually(told.is_set)
    assert joined.gone == "has not answered for 0.01 s"
    assert rank.recv(1) == b""  # nobody waits for what it would have said
    assert joined.wait_status(1, 60.0) is None
    for sock in (node, rank, control):
        sock.close()


def test_a_node_says_how_its_ranks_ended_and_is_there_as_long_as_it_says_anything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = socket.create_connection(server.getsockname())
        ours = server.accept()[0]
    joined = JoinedNode(NodeHello(1, 1, IDENTITY), Connection(ours, begin_decoder), "127.0.0.2", 60.0, lambda: None)
    agent = Connection(node, begin_decoder)
    agent.send(NodeAlive())
    agent.send(RankEnded(1, -9))
    assert RemoteProcess(1, joined).wait(60.0) == -9
    assert not joined.gone
    agent.close()
    eventually(lambda: joined.gone, lambda why: why == "closed its connection")


def test_ranks_of_an_earlier_group_are_refused(leader: Leader) -> None:
    node = leader.join()
    told = begin(node)
    for hello in (RankHello("earlier", 1), LinkHello("", 0), RankHello(told.session, 7)):
        with pytest.raises(Refused, match="ranks that have ended"):
            leader.dial(hello)


def test_a_node_that_does_not_come_is_named() -> None:
    leader = Leader(replace(SETTINGS, node_timeout_s=0.01))
    with pytest.raises(EngineFailed, match=r"node 1 of 2 did not come to 127.0.0.1:\d+ within 0.01 s"):
        leader.gathered.result(60.0)
    leader.close()


def agent(nodes: Nodes, settings: EngineSettings = SETTINGS, identity: GroupIdentity = IDENTITY) -> NodeAgent:
    return NodeAgent(replace(nodes, rank=1), identity, "model", settings)


def test_a_node_says_why_the_leader_refuses_it(leader: Leader) -> None:
    with pytest.raises(ConfigError, match=r"the leader at 127.0.0.1:\d+ refuses node 1: nnodes is 2 at the leader"):
        agent(leader.nodes, identity=replaced(num_nodes=3)).run()


def test_a_node_does_not_wait_for_ever() -> None:
    with bind_here("127.0.0.1", 0, or_anywhere=False) as reserved:
        nodes = Nodes(2, 1, "127.0.0.1", reserved.getsockname()[1])
        with pytest.raises(EngineUnavailable, match=r"no leader at 127.0.0.1:\d+ for 0.01 s"):
            agent(nodes, replace(SETTINGS, node_timeout_s=0.01)).run()


def test_without_a_secret_nodes_are_on_loopback_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_RANKS_SECRET")
    monkeypatch.delenv("PENSTOCK_GATEWAY_SECRET", raising=False)
    away = Nodes(2, 1, "10.0.0.7")
    with pytest.raises(ConfigError, match="need a secret: the same PENSTOCK_RANKS_SECRET"):
        agent(away)
    agent(away, replace(SETTINGS, insecure_ranks=True))
    agent(replace(away, host="127.0.0.1"))


def test_the_secret_is_the_ranks_own_or_the_replicas() -> None:
    both = {"PENSTOCK_RANKS_SECRET": "a", "PENSTOCK_GATEWAY_SECRET": "b"}
    assert secret_of(both) == b"a"
    assert secret_of({"PENSTOCK_GATEWAY_SECRET": "b"}) == b"b"
    assert secret_of({}) == b""


def test_an_address_of_another_machine_is_listened_for_on_all_of_this_one() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen for other nodes on 192\.0\.2\.1"):
        bind_here("192.0.2.1", 0, or_anywhere=False)
    with bind_here("192.0.2.1", 0, or_anywhere=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"
