"""How a rank meets the others: which device is its own, and by what memory they exchange numbers."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store, TCPStore

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings
from penstock.model.ops.shared_memory import SharedMemoryRanks
from penstock.model.ranks import Ranks, SingleRank
from penstock.model.shard import Shard
from penstock.model.stages import Stage, stage_layers
from penstock.runner.ranks.links import SocketLink
from penstock.runner.ranks.messages import Ways

SHARE_VARIABLE = "PENSTOCK_SHARE_GPU"  # 1: ranks may share a GPU, which is of use to tests alone


class JoinedRanks(Ranks, Protocol):
    def give_up(self, rank: int) -> None:
        """Tell all that a rank is gone, so that nobody waits for it. Any thread may."""


def device_of(wanted: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The rank's device: a GPU of its own, or the CPU for all."""
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
    """A rank's place among the others: who splits layers with it, and which layers are its stage's."""

    parallelism: Parallelism
    device: torch.device
    ranks: JoinedRanks
    stage: Stage


class Meeting:
    """Where ranks of one host meet, made by the first: what each shares with others, and an address for all."""

    def __init__(self, settings: EngineSettings, parallelism: Parallelism) -> None:
        self._settings = settings
        self._parallelism = parallelism
        self._store: TCPStore | None = None
        self.address = ""
        size, tp = parallelism.num_ranks, parallelism.tp
        if device_of(settings.device, 0, size).type == "cuda":
            self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
            self.address = f"127.0.0.1:{self._store.port}"
            self.ways = [Ways() for _ in range(size)]
            return
        memories = [SharedMemoryRanks.create(tp) if tp > 1 else None for _ in range(parallelism.pp)]
        pairs = [_descriptors(socket.socketpair()) for _ in range(size - tp)]  # by the rank that sends
        self.ways = [
            Ways(
                memories[rank // tp],
                before=pairs[rank - tp][1] if rank >= tp else None,
                after=pairs[rank][0] if rank < size - tp else None,
            )
            for rank in range(size)
        ]

    def join(self, config: ModelConfig) -> Place:
        """The first rank's side, once the others have been started. What was theirs is closed here."""
        own = self.ways[0]
        for descriptor in {each for ways in self.ways[1:] for each in ways.descriptors} - set(own.descriptors):
            os.close(descriptor)
        return join(self._settings, self._parallelism, 0, own, self._store, config)


def join(
    settings: EngineSettings,
    parallelism: Parallelism,
    rank: int,
    ways: Ways,
    store: Store | None,
    config: ModelConfig,
) -> Place:
    """A rank's place, by what it was given. All ranks call this at once."""
    number, tp = rank // parallelism.tp, parallelism.tp
    device = device_of(settings.device, rank, parallelism.num_ranks)
    if device.type == "cuda":
        assert store is not None
        return _join_on_gpus(settings, parallelism, rank, device, store, config)
    shard = Shard(rank % tp, tp)
    ranks: JoinedRanks
    if tp == 1:
        ranks = LoneStage()
    else:
        assert ways.memory is not None
        ranks = SharedMemoryRanks(shard, ways.memory, timeout_s=settings.rank_timeout_s, first_rank=number * tp)
    if parallelism.pp == 1:
        return Place(parallelism, device, ranks, Stage())

    def link(descriptor: int | None, other: int) -> SocketLink | None:
        if descriptor is None:
            return None
        sock = socket.socket(fileno=descriptor)
        return SocketLink(sock, hidden=config.hidden_size, other=other, timeout_s=settings.rank_timeout_s)

    layers = stage_layers(config, parallelism.pp)[number]
    stage = Stage(layers, link(ways.before, rank - tp), link(ways.after, rank + tp))
    return Place(parallelism, device, ranks, stage)


def _join_on_gpus(
    settings: EngineSettings,
    parallelism: Parallelism,
    rank: int,
    device: torch.device,
    store: Store,
    config: ModelConfig,
) -> Place:
    from penstock.runner.ranks.symmetric_memory import LinkMemory, SymmetricMemoryLink, SymmetricMemoryRanks, meet

    tp, size = parallelism.tp, parallelism.num_ranks
    group = meet(store, rank, size, tp)
    ranks: JoinedRanks = SymmetricMemoryRanks(Shard(rank % tp, tp), device, group) if tp > 1 else LoneStage()
    if parallelism.pp == 1:
        return Place(parallelism, device, ranks, Stage())
    memory = LinkMemory(rank, device)
    dtype = torch.bfloat16 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    before, after = (
        SymmetricMemoryLink(memory, other, hidden=config.hidden_size, dtype=dtype) if 0 <= other < size else None
        for other in (rank - tp, rank + tp)
    )
    if before is not None:
        before.offer()
    return Place(parallelism, device, ranks, Stage(stage_layers(config, parallelism.pp)[rank // tp], before, after))


class LoneStage(SingleRank):
    """The only rank of its stage."""

    def give_up(self, rank: int) -> None:
        """Nobody waits here."""


def store_at(address: str, size: int) -> Store | None:
    """The first rank's store; "": ranks need none."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), size, is_master=False)


def _descriptors(pair: tuple[socket.socket, socket.socket]) -> tuple[int, int]:
    return pair[0].detach(), pair[1].detach()
