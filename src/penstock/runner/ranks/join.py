"""How a rank meets the others: which device is its own, and by what memory they exchange numbers."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store, TCPStore

from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings
from penstock.model.ops.shared_memory import SharedMemoryRanks
from penstock.model.ranks import Ranks
from penstock.model.shard import Shard

SHARE_VARIABLE = "PENSTOCK_SHARE_GPU"  # 1: ranks may share a GPU, which is of use to tests alone


class JoinedRanks(Ranks, Protocol):
    def give_up(self, rank: int) -> None:
        """Tell all that a rank is gone, so that nobody waits for it. Any thread may."""


def device_of(wanted: str, shard: Shard) -> torch.device:
    """The rank's device: a GPU of its own, or the CPU for all."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        wanted = "cuda" if num_gpus else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not num_gpus:
        raise ConfigError("device is cuda, but torch finds no GPU here", param="device")
    if num_gpus < shard.size and os.environ.get(SHARE_VARIABLE) != "1":
        raise ConfigError(f"tp is {shard.size}, but there are {num_gpus} GPUs here", param="tp")
    device = torch.device("cuda", shard.rank % num_gpus)
    torch.cuda.set_device(device)
    return device


class Meeting:
    """The place where ranks of one host meet, made by the first: a descriptor and an address for the others."""

    def __init__(self, settings: EngineSettings, size: int) -> None:
        self._settings = settings
        self._shard = Shard(0, size)
        self._store: TCPStore | None = None
        self.memory: int | None = None
        self.address = ""
        if device_of(settings.device, self._shard).type == "cuda":
            self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
            self.address = f"127.0.0.1:{self._store.port}"
        else:
            self.memory = SharedMemoryRanks.create(size)

    def join(self) -> JoinedRanks:
        """The first rank's side, once the others have been started."""
        return join(self._settings, self._shard, self.memory, self._store)


def join(settings: EngineSettings, shard: Shard, memory: int | None, store: Store | None) -> JoinedRanks:
    if memory is not None:
        return SharedMemoryRanks(shard, memory, timeout_s=settings.rank_timeout_s)
    from penstock.runner.ranks.symmetric_memory import SymmetricMemoryRanks

    assert store is not None
    return SymmetricMemoryRanks(shard, device_of(settings.device, shard), store)


def store_at(address: str, size: int) -> Store | None:
    """The first rank's store; "": ranks need none."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), size, is_master=False)
