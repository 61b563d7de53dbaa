"""An engine that is ready to run steps, and what every "auto" came to, for the scheduler and for whoever prints it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.quant import Quant
from penstock.runner.embedder import DecoderEmbedder
from penstock.runner.limits import Limits
from penstock.runner.lora import RunnerAdapters
from penstock.runner.parking import CpuMemory
from penstock.runner.size import EngineSize
from penstock.runner.virtual_memory import VirtualMemory
from penstock.sched.plan import Runner


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
    runner: Runner
    device: Device
    formats: Formats
    size: EngineSize
    copy_s: float = 0.0  # to copy a block to host memory and back
    draft: Drafting | None = None  # a small model in the same blocks
    adapters: RunnerAdapters | None = None  # None: it cannot run any
    embedder: DecoderEmbedder | None = None  # None: it makes no vectors
    memory: CpuMemory | VirtualMemory | None = None  # None: it cannot be given back

    @property
    def limits(self) -> Limits:
        return self.size.limits
