"""A node without the leader: it joins it, starts the ranks that are its own, and joins again when they have ended.

It opens all sockets between nodes and hands them to its ranks' processes, which know no secret. It outlives the ranks:
when the leader ends, by whatever death, its ranks are ended, and it waits for the next leader.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.core.cores import usable_cores
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.model_config import ModelConfig
from penstock.core.nodes import Nodes
from penstock.core.settings import EngineSettings
from penstock.link.connection import Connection, Disconnected
from penstock.link.proof import Refused
from penstock.runner.ranks.gathering import NodeListener, bind_here, check_secret, secret_of
from penstock.runner.ranks.handshake import dial, welcome
from penstock.runner.ranks.messages import (
    Begin,
    GroupIdentity,
    Hello,
    LinkHello,
    NodeAlive,
    NodeHello,
    RankEnded,
    RankHello,
    RankSpec,
    Refusal,
    begin_decoder,
)
from penstock.runner.ranks.process import LocalProcess, start_rank
from penstock.runner.ranks.ways import close_descriptors, links_between, make_ways

log = logging.getLogger("penstock.runner")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two tries to reach the leader

_BEATS = 6  # signs of life in the time after which this node would be given up

Say = Callable[[str], None]


class NodeAgent:
    def __init__(
        self,
        nodes: Nodes,
        identity: GroupIdentity,
        model: str | ModelConfig,
        settings: EngineSettings,
        say: Say = lambda line: None,
    ) -> None:
        """`model`: see `RankSpec`. `say`: is told in words what this node is doing. Raises ConfigError."""
        self._nodes = nodes
        self._identity = identity
        self._model = model
        self._settings = settings
        self._say = say
        self._is_stopped = False  # a plain value, which a handler of signals may set
        self._leader: Connection | None = None
        self._secret = secret_of(os.environ)
        check_secret(nodes, settings, self._secret)

    def run(self) -> None:
        """Runs for as long as there is a leader to be found. Raises ConfigError if it refuses this node, and
        EngineUnavailable if nobody is there for `node_timeout_s`."""
        while not self._is_stopped:
            with contextlib.ExitStack() as life:
                self._live(life)
            self._leader = None
            time.sleep(_FIRST_PAUSE_S)

    def leave(self, within_s: float) -> bool:
        """End `run` when the leader has ended, which may have streams to finish, or after this time. Whether there is a
        leader. Any thread may call this, and a handler of signals."""
        self._is_stopped = True
        if self._leader is None:
            return False
        timer = threading.Timer(within_s, self._leader.close)
        timer.daemon = True
        timer.start()
        return True

    def _live(self, life: contextlib.ExitStack) -> None:
        """One life of the group: until the leader has gone."""
        links = _Links()
        leader = self._join(links, life)
        if leader is None:
            return
        connection = self._leader = Connection(leader, begin_decoder)
        life.callback(connection.close)
        threading.Thread(target=self._beat, args=(connection,), name="alive", daemon=True).start()
        try:
            begin = connection.receive()
        except Disconnected:
            return
        own = begin.nodes.ranks_of(self._nodes.rank)
        numbers = f"ranks {own[0]} to {own[-1]}" if len(own) > 1 else f"rank {own[0]}"
        self._say(f"node {self._nodes.rank} starts {numbers} for the leader at {self._nodes.address}")
        try:
            processes = self._start(begin, links)
        except (OSError, Refused) as error:
            log.warning("the ranks of this node cannot be started: %s", error)
            return
        life.callback(_end, processes)
        for rank, process in processes.items():
            args = (rank, process, connection)
            threading.Thread(target=_report_end, args=args, name=f"rank-{rank}", daemon=True).start()
        with contextlib.suppress(Disconnected):
            connection.receive()  # nothing more is ever said
        self._say("the leader has ended; this node's ranks end too, and it waits for the next one")

    def _beat(self, leader: Connection) -> None:
        with contextlib.suppress(Disconnected):
            while True:
                leader.send(NodeAlive())
                time.sleep(self._settings.rank_timeout_s / _BEATS)

    def _join(self, links: _Links, life: contextlib.ExitStack) -> socket.socket | None:
        """A connection to the leader, which has welcomed this node. None: it was told to stop."""
        deadline_s = time.monotonic() + self._settings.node_timeout_s
        pause_s, is_told, why = _FIRST_PAUSE_S, False, ""
        while time.monotonic() < deadline_s:
            if self._is_stopped:
                return None
            try:
                return self._ask(links, life)
            except Refused as refused:
                why = refused.reason
                if refused.is_final:
                    raise ConfigError(
                        f"the leader at {self._nodes.address} refuses node {self._nodes.rank}: {why}", param="node_rank"
                    ) from None
            except OSError as error:
                why = error.strerror or str(error)
            if not is_told:
                self._say(f"node {self._nodes.rank} waits for the leader at {self._nodes.address} ({why})")
                is_told = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise EngineUnavailable(
            f"no leader at {self._nodes.address} for {self._settings.node_timeout_s:g} s (node_timeout_s): {why}"
        )

    def _ask(self, links: _Links, life: contextlib.ExitStack) -> socket.socket:
        host = self._settings.node_host or _way_to(self._nodes)
        listener = NodeListener(bind_here(host, 0, or_anywhere=False), self._secret, self._settings, links.greet)
        try:
            hello = NodeHello(self._nodes.rank, listener.port, self._identity)
            sock = self._dial((self._nodes.host, self._nodes.port), hello)
        except BaseException:
            listener.close()
            raise
        life.callback(listener.close)
        return sock

    def _dial(self, address: tuple[str, int], hello: Hello) -> socket.socket:
        source = self._settings.node_host or ""
        return dial(address, hello, self._secret, self._settings.rank_timeout_s, source)

    def _start(self, begin: Begin, links: _Links) -> dict[int, LocalProcess]:
        """Processes of this node's ranks, with all their sockets."""
        nodes, parallelism, node = begin.nodes, begin.parallelism, self._nodes.rank
        own, master = nodes.ranks_of(node), self._nodes.host
        leaving, arriving = links_between(parallelism, nodes, node)
        with contextlib.ExitStack() as held:  # here, until the processes have them
            controls, between = {}, {}
            for rank in own:
                controls[rank] = self._dial((master, self._nodes.port), RankHello(begin.session, rank))
                held.callback(controls[rank].close)
            for sender in arriving:
                there = nodes.node_of(sender)
                address = (nodes.hosts[there], begin.ports[there]) if there else (master, self._nodes.port)
                between[sender] = held.enter_context(self._dial(address, LinkHello(begin.session, sender)))
            for sender in leaving:
                between[sender] = held.enter_context(links.wait(begin.session, sender, self._settings.rank_timeout_s))
            descriptors = {sender: sock.fileno() for sender, sock in between.items()}
            ways = make_ways(parallelism, nodes, node, descriptors, shares_memory=begin.engine.device == "cpu")
            held.callback(close_descriptors, ways.values(), besides=descriptors.values())
            engine = replace(
                begin.engine,
                threads=self._settings.threads or max(1, usable_cores() // len(own)),
                node_rank=node,
                node_host=self._settings.node_host,
            )
            store = f"{master}:{begin.store_port}" if begin.store_port else ""
            return {
                rank: start_rank(
                    RankSpec(rank, parallelism, controls[rank].fileno(), ways[rank], store, nodes, self._model, engine)
                )
                for rank in own
            }


class _Links:
    """Ways of a pipeline that other nodes have opened to ranks of this one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sockets: dict[tuple[str, int], socket.socket] = {}

    def greet(self, hello: Hello, connection: Connection, host: str) -> None:
        if not isinstance(hello, LinkHello):
            connection.send(Refusal("this node is not the leader", is_final=True))
            connection.close()
            return
        welcome(connection)
        sock = connection.detach()
        sock.settimeout(None)
        with self._changed:
            self._sockets[hello.session, hello.sender] = sock
            self._changed.notify_all()

    def wait(self, session: str, sender: int, timeout_s: float) -> socket.socket:
        """Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: (session, sender) in self._sockets, timeout_s):
                raise TimeoutError(f"the rank that follows rank {sender} in the pipeline did not connect")
            return self._sockets.pop((session, sender))


def _report_end(rank: int, process: LocalProcess, leader: Connection) -> None:
    status = process.wait()
    with contextlib.suppress(Disconnected):
        leader.send(RankEnded(rank, status))


def _end(processes: dict[int, LocalProcess]) -> None:
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait()


def _way_to(nodes: Nodes) -> str:
    """This node's own address on its way to the leader. Nothing is sent. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
