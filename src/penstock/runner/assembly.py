"""An engine that is ready to run steps, and what every "auto" came to, for the scheduler and for whoever prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.expert_load import ExpertLoad
from penstock.core.expert_placement import ExpertPlacement
from penstock.core.parallelism import Parallelism
from penstock.core.parking import MemoryChange
from penstock.model.lora import HostAdapter
from penstock.model.ops import LayerKV
from penstock.quant import Quant
from penstock.runner.kv_memory import RankCache, SharedCache
from penstock.runner.limits import Limits
from penstock.runner.mapped_memory import RankPool
from penstock.runner.moving import HostCopies
from penstock.runner.runner import RankRunner
from penstock.runner.size import EngineSize
from penstock.runner.virtual_memory import VirtualMemory
from penstock.sched.plan import Runner


class Adapters(Protocol):
    """LoRA adapters in host memory, to be placed by steps: see `RunnerAdapters`."""

    @property
    def num_slots(self) -> int: ...

    def read(self, path: str, digest: str) -> HostAdapter: ...

    def keep(self, adapter: HostAdapter) -> None: ...

    def forget(self, digest: str) -> None: ...

    def clear(self, slot: int) -> None: ...


class Embedder(Protocol):
    """Vectors and scores of whole texts: see `DecoderEmbedder`."""

    most_tokens: int

    @property
    def num_parts(self) -> int:
        """Tokens of texts that were computed so far."""

    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]: ...

    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]: ...

    def token_logprobs(self, texts: Sequence[Sequence[int]], num_top: int) -> list[bytes]: ...


class Memory(Protocol):
    """Memory that an idle engine can give back: `CpuMemory`, `VirtualMemory`."""

    def park(self) -> MemoryChange: ...

    def wake(self) -> MemoryChange: ...


class Experts(Protocol):
    """The experts of a mixture, on all ranks: see `RankExperts`."""

    @property
    def redundant(self) -> int | None: ...

    def load(self) -> ExpertLoad: ...

    def place(self, layer: int, placement: ExpertPlacement) -> None: ...


@dataclass(frozen=True)
class Device:
    name: str  # torch's
    driver_name: str = ""  # of a GPU
    uuid: str = ""  # of a GPU: by it others know which one is ours


@dataclass(frozen=True)
class Formats:
    kernels: str  # what they are written in
    number_format: str  # of activations, and of weights that are not quantized
    quant: Quant  # of linear weights
    kv_dtype: str


@dataclass(frozen=True)
class Drafting:
    runner: Runner
    context_length: int  # it has nothing to say beyond


@dataclass(frozen=True)
class Assembly:
    runner: Runner  # for the scheduler
    rank_runner: RankRunner  # of this rank; of a single one, the same
    device: Device
    formats: Formats
    size: EngineSize
    copy_s: float = 0.0  # to copy a block to host memory and back
    host: HostCopies | None = None  # blocks in host memory, if there are any
    kv_layout: str = ""  # all, but for the model's files, that a block's bytes depend on
    draft: Drafting | None = None  # a small model in the same blocks
    adapters: Adapters | None = None  # None: it cannot run any
    embedder: Embedder | None = None  # None: it makes no vectors
    parallelism: Parallelism = Parallelism()  # noqa: RUF009 (frozen)
    kv_share: float = 1.0  # of keys and values of all heads, layers and tokens: what this rank keeps
    memory: Memory | None = None  # None: it cannot be given back
    other_gpus: tuple[str, ...] = ()  # UUIDs of those that other ranks have, on this node
    experts: Experts | None = None  # None: it is no mixture
    kv: Sequence[LayerKV] = ()  # of this rank
    other_caches: tuple[RankCache | RankPool, ...] = ()  # of other ranks, in their order, that this one can reach
    kv_home: SharedCache | VirtualMemory | None = None  # where it lies; None: wherever torch has put it
    state_bytes: int = 0  # on this rank, of recurrent states of as many sequences as may run; 0: the model has none

    @property
    def limits(self) -> Limits:
        return self.size.limits
