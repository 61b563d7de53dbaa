"""Joining of a rank with the others: which device is its own, and by what memory they exchange numbers."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.nodes import NodeMap
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings
from penstock.model.ops.shared_memory import SharedMemoryRanks
from penstock.model.ranks import Ranks, SingleRank
from penstock.model.shard import Shard
from penstock.model.stages import Link, Stage, stage_layers
from penstock.runner.ranks.links import SocketLink
from penstock.runner.ranks.messages import Ways

SHARE_VARIABLE = "PENSTOCK_SHARE_GPU"  # 1: ranks may share a GPU, which is of use to tests alone
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address at which what listens on all is found


class JoinedRanks(Ranks, Protocol):
    def give_up(self, rank: int) -> None:
        """Tell all that a rank is gone, so that nobody waits for it. Any thread may."""


def device_of(wanted: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The rank's device: a GPU of its own, or the CPU for all. Ranks are counted on this node."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        wanted = "cuda" if num_gpus else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not num_gpus:
        raise ConfigError("device is cuda, but torch finds no GPU here", param="device")
    if num_gpus < num_ranks and os.environ.get(SHARE_VARIABLE) != "1":
        raise ConfigError(f"{num_ranks} ranks need as many GPUs, and there are {num_gpus} here", param="tp")
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class Place:
    """A rank's place among the others: who splits layers with it, which layers are its stage's, and its device."""

    parallelism: Parallelism
    nodes: NodeMap
    ranks: JoinedRanks
    stage: Stage
    device: torch.device

    @property
    def answers(self) -> bool:
        """Whether it is this follower whose results the leader needs: the first rank of a pipeline's last stage."""
        return self.stage.before is not None and self.stage.after is None and self.ranks.shard.rank == 0


def make_store(settings: EngineSettings, parallelism: Parallelism, nodes: NodeMap, host: str) -> TCPStore | None:
    """Store where ranks find each other before they have collectives, made by the first, at its address. None: they
    have no need of one, as on a CPU, where ranks of a stage that is on one node share memory."""
    on_gpus = device_of(settings.device, 0, nodes.sizes[0]).type == "cuda"
    if not on_gpus and not any(nodes.spans(stage) for stage in _stages(parallelism)):
        return None
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.bind((host, 0))
    listening.listen()
    own, port = _ANYWHERE.get(host, host), listening.getsockname()[1]
    return TCPStore(own, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join(
    settings: EngineSettings,
    parallelism: Parallelism,
    nodes: NodeMap,
    rank: int,
    ways: Ways,
    store: Store | None,
    config: ModelConfig,
) -> Place:
    """A rank's place, by what it was given. All ranks call this at once."""
    number, tp = rank // parallelism.tp, parallelism.tp
    shard, timeout_s = Shard(rank % tp, tp, parallelism.sp), settings.rank_timeout_s
    node = nodes.node_of(rank)
    own = nodes.ranks_of(node)
    device = device_of(settings.device, rank - own.start, len(own))
    if store is not None:
        store.set(here_key(rank), "")
    if device.type == "cuda" and len(nodes.sizes) == 1:
        assert store is not None
        return _join_on_gpus(settings, parallelism, nodes, rank, device, store, config)
    ranks: JoinedRanks
    if tp == 1:
        ranks = LoneStage()
    elif ways.memory is not None:
        ranks = SharedMemoryRanks(shard, ways.memory, timeout_s=timeout_s, first_rank=number * tp)
    else:
        assert store is not None
        from penstock.runner.ranks.gloo import DistributedRanks

        others = [here_key(other) for other in range(number * tp, (number + 1) * tp)]
        store.wait(others, timedelta(seconds=settings.node_timeout_s))
        ranks = DistributedRanks(
            shard,
            device,
            store,
            host=nodes.hosts[node],
            timeout_s=timeout_s,
            first_rank=number * tp,
            where=nodes.where,
        )
    if parallelism.pp == 1:
        return Place(parallelism, nodes, ranks, Stage(), device)
    layers = stage_layers(config, parallelism.pp)[number]
    if device.type == "cuda":
        assert store is not None
        before, after = _links_of_gpus(settings, parallelism, nodes, rank, device, store, config)
        return Place(parallelism, nodes, ranks, Stage(layers, before, after), device)

    def link(descriptor: int | None, other: int) -> SocketLink | None:
        if descriptor is None:
            return None
        sock, where = socket.socket(fileno=descriptor), nodes.where(other)
        return SocketLink(sock, hidden=config.hidden_size, other=other, where=where, timeout_s=timeout_s)

    stage = Stage(layers, link(ways.before, rank - tp), link(ways.after, rank + tp))
    return Place(parallelism, nodes, ranks, stage, device)


def _links_of_gpus(
    settings: EngineSettings,
    parallelism: Parallelism,
    nodes: NodeMap,
    rank: int,
    device: torch.device,
    store: Store,
    config: ModelConfig,
) -> tuple[Link | None, Link | None]:
    """Ways between stages on GPUs of several nodes, by NCCL."""
    from penstock.runner.ranks.gloo import DistributedLink, make_group

    size, host = parallelism.num_ranks, nodes.hosts[nodes.node_of(rank)]
    store.wait([here_key(other) for other in range(size)], timedelta(seconds=settings.node_timeout_s))
    own = PrefixStore("links", store)
    group = make_group(device, own, rank, size, host=host, timeout_s=settings.rank_timeout_s)

    def link(other: int) -> Link | None:
        if not 0 <= other < size:
            return None
        where, hidden = nodes.where(other), config.hidden_size
        return DistributedLink(group, other, device, hidden=hidden, dtype=_stream_dtype(settings), where=where)

    return link(rank - parallelism.tp), link(rank + parallelism.tp)


def _join_on_gpus(
    settings: EngineSettings,
    parallelism: Parallelism,
    nodes: NodeMap,
    rank: int,
    device: torch.device,
    store: Store,
    config: ModelConfig,
) -> Place:
    """Place of this rank among GPUs of one node."""
    from penstock.runner.ranks.symmetric_memory import LinkMemory, SymmetricMemoryLink, SymmetricMemoryRanks, meet

    tp, size = parallelism.tp, parallelism.num_ranks
    group = meet(store, rank, size, tp)
    shard = Shard(rank % tp, tp, parallelism.sp)
    ranks: JoinedRanks = LoneStage()
    if tp > 1:
        ranks = _with_nccl(settings, SymmetricMemoryRanks(shard, device, group), nodes, rank, device, store)
    if parallelism.pp == 1:
        return Place(parallelism, nodes, ranks, Stage(), device)
    memory = LinkMemory(rank, device)
    dtype = _stream_dtype(settings)
    before, after = (
        SymmetricMemoryLink(memory, other, hidden=config.hidden_size, dtype=dtype) if 0 <= other < size else None
        for other in (rank - tp, rank + tp)
    )
    if before is not None:
        before.offer()
    stage = Stage(stage_layers(config, parallelism.pp)[rank // tp], before, after)
    return Place(parallelism, nodes, ranks, stage, device)


def _with_nccl(
    settings: EngineSettings, small: JoinedRanks, nodes: NodeMap, rank: int, device: torch.device, store: Store
) -> JoinedRanks:
    """Large sums by NCCL, where each rank of this node has a GPU of its own: NCCL refuses two ranks on one."""
    from torch.distributed import is_nccl_available

    if torch.cuda.device_count() < sum(nodes.sizes) or not is_nccl_available():
        return small
    from penstock.runner.ranks.by_size import SumsBySize, nccl_beyond_bytes
    from penstock.runner.ranks.gloo import DistributedRanks

    shard = small.shard
    large = DistributedRanks(
        shard, device, store, host="", timeout_s=settings.rank_timeout_s, first_rank=rank - shard.rank
    )
    large.sum(torch.zeros(1, device=device))  # its connections and memory, before the cache takes the rest
    return SumsBySize(small, large, beyond_bytes=nccl_beyond_bytes(shard.size))


def _stream_dtype(settings: EngineSettings) -> torch.dtype:
    """Number format of the residual stream on a GPU."""
    return torch.bfloat16 if settings.dtype == "auto" else getattr(torch, settings.dtype)


def here_key(rank: int) -> str:
    """The key of a store that says that a rank is about to join."""
    return f"here-{rank}"


def _stages(parallelism: Parallelism) -> list[range]:
    tp = parallelism.tp
    return [range(tp * stage, tp * (stage + 1)) for stage in range(parallelism.pp)]


class LoneStage(SingleRank):
    """The only rank of its stage."""

    def give_up(self, rank: int) -> None:
        """Nobody waits here."""


def store_at(address: str) -> Store | None:
    """The first rank's store; "": ranks need none."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    return TCPStore(host.strip("[]"), int(port), None, is_master=False)
