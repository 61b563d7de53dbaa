"""Nodes that one replica's ranks are spread over: how many there are, which one this is, where the first is found, and
which ranks each of them has. It opens no socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from itertools import accumulate

from penstock.core.errors import ConfigError
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings

MASTER_PORT = 29500  # as torch has it
SECRET_VARIABLE = "PENSTOCK_RANKS_SECRET"
_LWS = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")
_TORCH = ("WORLD_SIZE", "RANK", "MASTER_ADDR")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun itself listens at MASTER_PORT


@dataclass(frozen=True)
class Nodes:
    """This node among those of its replica."""

    count: int = 1
    rank: int = 0
    host: str = ""  # the first node's
    port: int = MASTER_PORT
    source: str = ""  # of these, in words

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback_host(self.host)

    def __str__(self) -> str:
        return f"{self.count}, of which this is node {self.rank}; the first is at {self.address} ({self.source})"


@dataclass(frozen=True)
class NodeMap:
    """Ranks of each node: neighbours in number, so that a stage's are on one node where they fit."""

    sizes: tuple[int, ...]
    hosts: tuple[str, ...] = ()  # addresses of the nodes, once they are known

    def ranks_of(self, node: int) -> range:
        end = [*accumulate(self.sizes)][node]
        return range(end - self.sizes[node], end)

    def node_of(self, rank: int) -> int:
        return next(node for node, end in enumerate(accumulate(self.sizes)) if rank < end)

    def spans(self, ranks: range) -> bool:
        """Whether these ranks are on several nodes."""
        return self.node_of(ranks[0]) != self.node_of(ranks[-1])

    def where(self, rank: int) -> str:
        """The rank's node, for messages; on one node there is nothing to say."""
        if len(self.sizes) == 1 or rank not in range(sum(self.sizes)):
            return ""
        return self.name(self.node_of(rank))

    def name(self, node: int) -> str:
        host = self.hosts[node] if self.hosts else ""
        return f"node {node}, {host}" if host else f"node {node}"


def spread(parallelism: Parallelism, num_nodes: int, *, param: str = "nnodes") -> NodeMap:
    """Ranks over nodes: whole stages where there are enough of them, else equal parts of one. `param`: the setting that
    a ConfigError names."""
    tp, pp = parallelism.tp, parallelism.pp
    if num_nodes <= pp:
        ends = [pp * (node + 1) // num_nodes for node in range(num_nodes)]
        return NodeMap(tuple(tp * (end - begin) for begin, end in zip([0, *ends], ends, strict=False)))
    if num_nodes % pp == 0 and tp % (num_nodes // pp) == 0:
        return NodeMap((tp * pp // num_nodes,) * num_nodes)
    raise ConfigError(
        f"tp {tp} and pp {pp} cannot be spread over {num_nodes} nodes: pp must be at least nnodes, or nnodes a "
        "multiple of pp, and tp a multiple of the nodes of a stage",
        param=param,
    )


def auto_stages(tp: int | None, num_nodes: int) -> int:
    """Pipeline stages where `pp` is left open, before anybody asks what fits: one for each node, unless `tp` ranks of a
    single stage can be spread over all of them. `tp` None: it is open too."""
    return 1 if tp is not None and tp % num_nodes == 0 else num_nodes


def spread_settings(settings: EngineSettings, num_nodes: int, *, param: str) -> NodeMap:
    """Ranks over nodes by what settings say, or else by what a replica takes that is told of so many nodes."""
    pp = settings.pp or auto_stages(settings.tp, num_nodes)
    return spread(Parallelism(settings.tp or 1, pp), num_nodes, param=param)


def fewest_nodes(parallelism: Parallelism, per_node: int) -> NodeMap:
    """Ranks over as few nodes of so many GPUs as they can be spread over: at worst each has a node of its own."""
    for count in range(-(-parallelism.num_ranks // per_node), parallelism.num_ranks):
        with contextlib.suppress(ConfigError):
            found = spread(parallelism, count)
            if max(found.sizes) <= per_node:
                return found
    return NodeMap((1,) * parallelism.num_ranks)


def nodes_of(settings: EngineSettings, environ: Mapping[str, str]) -> Nodes:
    """The settings; what they leave open, LeaderWorkerSet's variables or torchrun's say. Raises ConfigError."""
    if settings.nnodes == 1:
        return Nodes()
    found = _from_lws(environ) or _from_torchrun(environ) or Nodes(0)
    given = []
    if settings.nnodes is not None:
        given.append("nnodes")
        found = replace(found, count=settings.nnodes)
    if settings.node_rank is not None:
        given.append("node_rank")
        found = replace(found, rank=settings.node_rank)
    if settings.master_addr is not None:
        given.append("master_addr")
        host, port = parse_address(settings.master_addr, MASTER_PORT)
        found = replace(found, host=host, port=port)
    if found.count == 0 and not given:
        return Nodes()
    if found.count == 1:
        return Nodes()
    if found.count == 0:
        raise ConfigError(f"{given[0]} is of use with nnodes alone, which is missing", param="nnodes")
    if not found.source and settings.node_rank is None:
        raise ConfigError(f"of {found.count} nodes, which is this? node_rank is missing", param="node_rank")
    if not found.host:
        raise ConfigError("master_addr is missing: the first node's HOST or HOST:PORT", param="master_addr")
    if not found.rank < found.count:
        raise ConfigError(f"node_rank is {found.rank}, but there are {found.count} nodes", param="node_rank")
    by_settings = f"by {', '.join(given)}" if given else ""
    return replace(found, source="; ".join(each for each in (by_settings, found.source) if each))


def with_nodes(settings: EngineSettings, nodes: Nodes) -> EngineSettings:
    """Settings that say themselves what the environment has said."""
    if nodes.count == 1:
        return replace(settings, nnodes=1, node_rank=None, master_addr=None)
    return replace(settings, nnodes=nodes.count, node_rank=nodes.rank, master_addr=nodes.address)


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """HOST, HOST:PORT, or an IPv6 address, in brackets if a port follows. Raises ConfigError."""
    host, port = text, ""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ConfigError(f"'{text}' is no address such as [::1]:{default_port}", param="master_addr")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ConfigError(f"'{text}' is no address such as 10.0.0.7 or 10.0.0.7:{default_port}", param="master_addr")
    return host, int(port or default_port)


def is_loopback_host(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _from_lws(environ: Mapping[str, str]) -> Nodes | None:
    if not all(environ.get(name) for name in _LWS):
        return None
    size, index, address = (environ[name] for name in _LWS)
    return Nodes(_number(_LWS[0], size), _number(_LWS[1], index), address, source=f"by {', '.join(_LWS)}")


def _from_torchrun(environ: Mapping[str, str]) -> Nodes | None:
    """A process of torchrun, or of what sets its variables for each node, as Kubeflow does."""
    if not all(environ.get(name) for name in _TORCH):
        return None
    if (each := _number("LOCAL_WORLD_SIZE", environ.get("LOCAL_WORLD_SIZE") or "1")) > 1:
        raise ConfigError(
            f"torchrun started {each} processes on this node; penstock starts ranks itself: --nproc-per-node is 1",
            param="nnodes",
        )
    count = "GROUP_WORLD_SIZE" if environ.get("GROUP_WORLD_SIZE") else "WORLD_SIZE"
    rank = "GROUP_RANK" if environ.get("GROUP_RANK") else "RANK"
    port = _number("MASTER_PORT", environ.get("MASTER_PORT") or str(MASTER_PORT))
    names = f"{count}, {rank}, MASTER_ADDR, MASTER_PORT"
    if environ.get(_AGENT_STORE) == "True":
        port, names = port + 1, f"{names} + 1, as torchrun listens there"
    return Nodes(
        _number(count, environ[count]), _number(rank, environ[rank]), environ["MASTER_ADDR"], port, f"by {names}"
    )


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} in the environment is {text!r}: expected a number", param="nnodes")
    return int(text)
