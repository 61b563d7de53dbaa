"""`penstock serve MODEL` on a node that is not the first of its replica: ranks of the model, and no server."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from penstock.cli import sd_notify
from penstock.cli.before_serving import check_generating, tls_of
from penstock.core.errors import ModelUnsupported
from penstock.core.nodes import SECRET_VARIABLE, Nodes
from penstock.core.parallelism import parallelism_of
from penstock.core.settings import Settings
from penstock.hub.encoder import EncoderCheckpoint

if TYPE_CHECKING:
    from penstock.runner.ranks.node_agent import NodeAgent


def serve_node(settings: Settings, nodes: Nodes) -> None:
    """Serves this node's ranks until a signal ends it, or no leader is there for long."""
    from penstock.runner.ranks.identity import group_identity
    from penstock.runner.ranks.node_agent import NodeAgent

    tls_of(settings.server)
    files = check_generating(settings)
    if isinstance(files, EncoderCheckpoint):
        raise ModelUnsupported("a model that makes vectors alone runs on one node")
    parallelism = parallelism_of(settings.engine, files.config)
    identity = group_identity(files, settings.engine, parallelism, nodes)
    model = files.config if settings.engine.load == "dummy" else settings.model
    agent = NodeAgent(nodes, identity, model, settings.engine, _say)
    leave = _Leave(agent, settings.server.drain_timeout_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    sd_notify.notify(sd_notify.READY)
    agent.run()


def share_ranks_secret(gateway_secret: str | None) -> None:
    """The secret of nodes is the replica's, unless there is one of its own: for the processes that are started from
    here on."""
    if gateway_secret and not os.environ.get(SECRET_VARIABLE):
        os.environ[SECRET_VARIABLE] = gateway_secret


def _say(line: str) -> None:
    print(line, flush=True)


class _Leave:
    """The handler of signals. SIGTERM comes to all nodes of a replica at once where one manager stops them, and the
    leader lets its streams finish: so this node's ranks go on until it has ended. SIGINT, and a second signal, end
    them."""

    def __init__(self, agent: NodeAgent, drain_timeout_s: float) -> None:
        self._agent = agent
        self._drain_timeout_s = drain_timeout_s
        self._is_leaving = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_urgent = number == signal.SIGINT or self._is_leaving
        self._is_leaving = True
        if is_urgent or not self._agent.leave(self._drain_timeout_s):
            sys.exit(0)  # what is open is closed on the way out, ranks among it
