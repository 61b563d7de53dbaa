"""The leader's side of several nodes: it listens until all of them are there, tells them to begin, and keeps what comes
of it: a connection to each rank and each node, and the ways of a pipeline that lead to other nodes.

Nodes come in any order, and may come again. One that is not of this replica is refused by name, and is waited for
further.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic

from penstock.api.relay import SECRET_VARIABLE as GATEWAY_SECRET_VARIABLE
from penstock.core.errors import ConfigError, EngineFailed
from penstock.core.nodes import SECRET_VARIABLE, NodeMap, Nodes, is_loopback_host
from penstock.core.settings import EngineSettings
from penstock.link.connection import Connection, Disconnected, close, shut_down
from penstock.link.proof import Refused
from penstock.runner.ranks.handshake import differences, receive_hello, welcome
from penstock.runner.ranks.messages import (
    Begin,
    GroupIdentity,
    Hello,
    LinkHello,
    NodeHello,
    RankEnded,
    RankHello,
    Refusal,
    from_node_decoder,
)
from penstock.runner.ranks.ways import links_between

log = logging.getLogger("penstock.runner")

_MAX_GREETINGS = 64  # connections whose handshake is not over; more are closed
_LAST_WORDS_S = 1.0  # for a node to say how a rank's process ended


def secret_of(environ: Mapping[str, str]) -> bytes:
    """The secret that nodes share; empty: there is none."""
    return (environ.get(SECRET_VARIABLE) or environ.get(GATEWAY_SECRET_VARIABLE) or "").encode()


def check_secret(nodes: Nodes, settings: EngineSettings, secret: bytes) -> None:
    if not secret and not settings.insecure_ranks and not nodes.is_loopback:
        raise ConfigError(
            f"nodes beyond this machine need a secret: the same {SECRET_VARIABLE} (or gateway_secret) on each of them; "
            "insecure_ranks does without",
            param="master_addr",
        )


OnHello = Callable[[Hello, Connection, str], None]


class NodeListener:
    """A port where other nodes call, and threads in which they prove who they are. `on_hello` is called in these, with
    the caller's address, and answers."""

    def __init__(self, sock: socket.socket, secret: bytes, settings: EngineSettings, on_hello: OnHello) -> None:
        self.port: int = sock.getsockname()[1]
        self._socket = sock
        self._secret = secret
        self._settings = settings
        self._on_hello = on_hello
        self._room = threading.BoundedSemaphore(_MAX_GREETINGS)
        sock.listen()
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def close(self) -> None:
        close(self._socket)

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, *_) = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE):
                    continue
                return  # it is closed
            is_trusted = self._secret or self._settings.insecure_ranks or is_loopback_host(host)
            if not is_trusted or not self._room.acquire(blocking=False):
                log.warning(
                    "a connection from %s is closed: %s", host, "too many" if is_trusted else "there is no secret"
                )
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock, host), name="greet-node", daemon=True).start()

    def _greet(self, sock: socket.socket, host: str) -> None:
        try:
            hello, connection = receive_hello(sock, self._secret, self._settings.rank_timeout_s)
            self._on_hello(hello, connection, host)
        except Refused as refused:
            log.warning("a connection from %s is refused: %s", host, refused.reason)
            close(sock)
        except (Disconnected, TimeoutError):
            close(sock)
        finally:
            self._room.release()


def bind_here(host: str, port: int, *, or_anywhere: bool) -> socket.socket:
    """A socket at this node's address by that name. `or_anywhere`: at all of its addresses, where none has the name,
    as behind a translation of addresses. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        found, reason = [], f"{host}: {error.strerror}"
    for family, _, _, _, address in found:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            reason = f"{host} port {port}: {error.strerror}"
            if error.errno != errno.EADDRNOTAVAIL:
                raise ConfigError(f"cannot listen for other nodes on {reason}", param="master_addr") from None
        else:
            return sock
    if not or_anywhere:
        raise ConfigError(f"cannot listen for other nodes on {reason}", param="master_addr")
    log.warning("%s is no address of this node: it listens for other nodes on all that it has", host)
    return bind_here("0.0.0.0", port, or_anywhere=False)


class JoinedNode:
    """Another node, as the leader knows it."""

    def __init__(
        self, hello: NodeHello, connection: Connection, host: str, timeout_s: float, on_change: Callable[[], None]
    ) -> None:
        """`timeout_s`: how long it may be silent."""
        self.number = hello.node
        self.host = host
        self.port = hello.port
        self.gone = ""  # why it is
        self.statuses: dict[int, int] = {}  # of processes that have ended, by rank
        self.connection = Connection(connection.detach(), from_node_decoder)
        self.own_host: str = connection.detach().getsockname()[0]  # by which it has reached us
        self._timeout_s = timeout_s
        self._held: list[socket.socket] = []
        self._changed = threading.Condition()
        self._on_change = on_change
        threading.Thread(target=self._listen, name=f"node-{self.number}", daemon=True).start()

    def hold(self, sock: socket.socket) -> None:
        """A connection to one of its ranks: it ends with the node's own, so that nobody waits for that rank."""
        with self._changed:
            self._held.append(sock)
            if self.gone:
                shut_down(sock)

    def _listen(self) -> None:
        try:
            while True:
                message = self.connection.receive(self._timeout_s)
                if isinstance(message, RankEnded):
                    with self._changed:
                        self.statuses[message.rank] = message.status
                        self._changed.notify_all()
        except Disconnected:
            gone = "closed its connection"
        except TimeoutError:
            gone = f"has not answered for {self._timeout_s:g} s"
        with self._changed:
            self.gone = gone
            for sock in self._held:
                shut_down(sock)
            self._changed.notify_all()
        self.connection.close()
        self._on_change()

    def wait_status(self, rank: int, timeout_s: float) -> int | None:
        """Exit status of a rank's process; None: the node has not said so in time, or cannot any more."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.statuses or self.gone, timeout_s)
            return self.statuses.get(rank)


class RemoteProcess:
    """A rank's process on another node, in the part of one on this."""

    def __init__(self, rank: int, node: JoinedNode) -> None:
        self._rank = rank
        self._node = node

    def poll(self) -> int | None:
        return self._node.statuses.get(self._rank)

    def wait(self, timeout: float = _LAST_WORDS_S) -> int:
        status = self._node.wait_status(self._rank, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout)
        return status

    def kill(self) -> None:
        """Its node does it when the leader is gone."""
        self._node.connection.close()

    @property
    def node_gone(self) -> str:
        """Reason why its node is gone; empty: it is not."""
        return self._node.gone


@dataclass(frozen=True)
class Gathered:
    """All nodes, and the sockets of this one to them."""

    nodes: NodeMap
    joined: dict[int, JoinedNode]
    controls: dict[int, socket.socket]  # by rank
    links: dict[int, socket.socket]  # from this node, by the rank that sends


class _NodeWentError(Exception):
    """A node went while the others were about to begin."""


class Gathering:
    def __init__(self, nodes: Nodes, node_map: NodeMap, identity: GroupIdentity, settings: EngineSettings) -> None:
        """It listens from here on. Raises ConfigError."""
        secret = secret_of(os.environ)
        check_secret(nodes, settings, secret)
        self._nodes = nodes
        self._map = node_map
        self._identity = identity
        self._settings = settings
        self._changed = threading.Condition()
        self._joined: dict[int, JoinedNode] = {}
        self._session = ""
        self._controls: dict[int, socket.socket] = {}
        self._links: dict[int, socket.socket] = {}
        listening = bind_here(nodes.host, nodes.port, or_anywhere=bool(secret) or settings.insecure_ranks)
        self.host: str = listening.getsockname()[0]
        self._listener = NodeListener(listening, secret, settings, self._greet)

    def gather(self, store_port: int, settings: EngineSettings) -> Gathered:
        """Wait until all nodes are there and have begun. `settings`: of their ranks. Raises EngineFailed."""
        deadline_s = monotonic() + self._settings.node_timeout_s
        try:
            while True:
                joined = self._wait_for_nodes(deadline_s)
                try:
                    return self._begin(joined, store_port, settings)
                except _NodeWentError as went:
                    log.warning("%s: all nodes are waited for anew", went)
                    self._drop(joined)
        finally:
            self.close()

    def close(self) -> None:
        """Nobody is let in any more."""
        self._listener.close()

    def _wait_for_nodes(self, deadline_s: float) -> dict[int, JoinedNode]:
        wanted = set(range(1, self._nodes.count))
        said: set[int] | None = None
        with self._changed:
            while missing := wanted - self._present():
                if missing != said:
                    log.info("waiting at %s for %s of %d", self._nodes.address, _names(missing), self._nodes.count)
                    said = missing
                if (left_s := deadline_s - monotonic()) <= 0:
                    raise EngineFailed(
                        f"{_names(missing)} of {self._nodes.count} did not come to {self._nodes.address} within "
                        f"{self._settings.node_timeout_s:g} s (node_timeout_s)"
                    )
                self._changed.wait(left_s)
            return dict(self._joined)

    def _begin(self, joined: dict[int, JoinedNode], store_port: int, settings: EngineSettings) -> Gathered:
        others = [joined[number] for number in sorted(joined)]
        hosts = (others[0].own_host, *(node.host for node in others))
        nodes = replace(self._map, hosts=hosts)
        parallelism = self._identity.parallelism
        ranks = {rank for rank in range(parallelism.num_ranks) if nodes.node_of(rank) > 0}
        links = {*links_between(parallelism, nodes, 0)[0]}
        with self._changed:
            self._session = secrets.token_hex(16)
        ports = [self._listener.port, *(node.port for node in others)]
        begin = Begin(self._session, parallelism, nodes, ports, store_port, settings)
        for node in others:
            with contextlib.suppress(Disconnected):  # its thread notices
                node.connection.send(begin)
        with self._changed:
            has_all = self._changed.wait_for(
                lambda: (self._controls.keys() >= ranks and self._links.keys() >= links) or self._gone(others),
                self._settings.rank_timeout_s,
            )
            if gone := self._gone(others):
                raise _NodeWentError(f"{nodes.name(gone[0].number)}, {gone[0].gone}")
            if not has_all:
                late = min({nodes.node_of(rank) for rank in ranks - self._controls.keys()}, default=1)
                raise _NodeWentError(f"{nodes.name(late)} did not start its ranks")
            return Gathered(nodes, joined, dict(self._controls), dict(self._links))

    def _drop(self, begun: dict[int, JoinedNode]) -> None:
        """Drops nodes that were told to begin: they start anew. A node that came in the place of one that went stays:
        it was told nothing yet."""
        with self._changed:
            for node in begun.values():
                node.connection.close()
            for sock in (*self._controls.values(), *self._links.values()):
                close(sock)
            self._joined = {number: node for number, node in self._joined.items() if node is not begun.get(number)}
            self._controls, self._links, self._session = {}, {}, ""

    def _present(self) -> set[int]:
        """Nodes that have joined and not gone; the others are forgotten."""
        self._joined = {number: node for number, node in self._joined.items() if not node.gone}
        return {*self._joined}

    def _gone(self, nodes: list[JoinedNode]) -> list[JoinedNode]:
        return [node for node in nodes if node.gone]

    def _greet(self, hello: Hello, connection: Connection, host: str) -> None:
        with self._changed:
            refusal = self._refusal(hello)
            if refusal is not None:
                who = f"node {hello.node}" if isinstance(hello, NodeHello) else "a rank"
                log.warning("%s at %s is refused: %s", who, host, refusal.reason)
                with contextlib.suppress(Disconnected):
                    connection.send(refusal)
                connection.close()
                return
            welcome(connection)
            sock = connection.detach()
            sock.settimeout(None)
            match hello:
                case NodeHello():
                    log.info("node %d is here, at %s", hello.node, host)
                    timeout_s = self._settings.rank_timeout_s
                    self._joined[hello.node] = JoinedNode(hello, connection, host, timeout_s, self._notify)
                case RankHello():
                    self._controls[hello.rank] = sock
                    if (node := self._joined.get(self._map.node_of(hello.rank))) is not None:
                        node.hold(sock)
                case LinkHello():
                    self._links[hello.sender] = sock
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _refusal(self, hello: Hello) -> Refusal | None:
        if not isinstance(hello, NodeHello):
            rank = hello.rank if isinstance(hello, RankHello) else hello.sender
            is_ours = hello.session == self._session and rank in range(self._identity.parallelism.num_ranks)
            return None if is_ours and self._session else Refusal("it belongs to ranks that have ended", is_final=False)
        if not 0 < hello.node < self._nodes.count:
            reason = f"node_rank is {hello.node}, but there are {self._nodes.count} nodes, and the leader is node 0"
            return Refusal(reason, is_final=True)
        if differing := differences(self._identity, hello.identity, hello.node):
            return Refusal(differing, is_final=True)
        if hello.node in self._present():
            return Refusal(f"node {hello.node} is here already, at {self._joined[hello.node].host}", is_final=False)
        return None


def _names(missing: set[int]) -> str:
    return f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
