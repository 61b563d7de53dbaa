"""Memory and sockets that ranks of one node share, and their sockets to ranks of other nodes: `Ways` for each."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from penstock.core.nodes import NodeMap
from penstock.core.parallelism import Parallelism
from penstock.runner.ranks.messages import Ways


def make_ways(
    parallelism: Parallelism, nodes: NodeMap, node: int, between: Mapping[int, int], *, shares_memory: bool
) -> dict[int, Ways]:
    """Ways of each rank of this node. `between`: descriptors of sockets from or to ranks of other nodes, by the rank
    that sends. `shares_memory`: ranks of a stage that is on one node do, by one descriptor; GPUs have ways of
    their own."""
    own, tp = nodes.ranks_of(node), parallelism.tp
    pairs = {rank: _descriptors(socket.socketpair()) for rank in own if rank + tp in own}  # by the rank that sends
    memories = {}
    for stage in {rank // tp for rank in own}:
        if shares_memory and tp > 1 and not nodes.spans(range(stage * tp, (stage + 1) * tp)):
            from penstock.model.ops.shared_memory import SharedMemoryRanks  # takes torch, which not all nodes need

            memories[stage] = SharedMemoryRanks.create(tp)
    return {
        rank: Ways(
            memories.get(rank // tp),
            before=pairs[rank - tp][1] if rank - tp in pairs else between.get(rank - tp),
            after=pairs[rank][0] if rank in pairs else between.get(rank),
        )
        for rank in own
    }


def links_between(parallelism: Parallelism, nodes: NodeMap, node: int) -> tuple[list[int], list[int]]:
    """Ways of a pipeline that leave this node, and those that arrive from another; by the rank that sends."""
    own, tp = nodes.ranks_of(node), parallelism.tp
    leaving = [rank for rank in own if rank + tp < parallelism.num_ranks and rank + tp not in own]
    arriving = [rank - tp for rank in own if rank >= tp and rank - tp not in own]
    return leaving, arriving


def close_descriptors(ways: Iterable[Ways], *, besides: Iterable[int]) -> None:
    for descriptor in {each for one in ways for each in one.descriptors} - {*besides}:
        os.close(descriptor)


def _descriptors(pair: tuple[socket.socket, socket.socket]) -> tuple[int, int]:
    return pair[0].detach(), pair[1].detach()
