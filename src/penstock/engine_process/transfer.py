"""KV transfer of an engine, put together from its settings."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.api.relay import SECRET_VARIABLE
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.nodes import is_loopback_host
from penstock.core.parking import MemoryChange
from penstock.core.settings import Settings
from penstock.engine.mailbox import Mailbox
from penstock.hub.weights_identity import weights_identity
from penstock.kv.cache import KVCache
from penstock.transfer.exchange import KvExchange
from penstock.transfer.messages import Layout
from penstock.transfer.nixl import NixlMissing, NixlMover
from penstock.transfer.ports import BlockMemory, Mover
from penstock.transfer.shared_memory import SharedMemoryMover
from penstock.transfer.tcp import TCP, TcpNetwork

if TYPE_CHECKING:
    from penstock.runner.assembly import Assembly, Memory

_PEER_S = 5.0  # of silence of another process, after which it is gone
_ENGINE_S = 30.0  # the same of the engine in it: its steps may take long


class Transfer(NamedTuple):
    exchange: KvExchange | None = None  # None: no KV blocks come or go
    port: int = 0
    layout: str = ""  # a digest
    movers: tuple[str, ...] = ()  # the best first
    memory: Memory | None = None  # that can be given back, as others have it mapped


def make_transfer(
    settings: Settings, config: ModelConfig, files: Path | None, assembly: Assembly, cache: KVCache, mailbox: Mailbox
) -> Transfer:
    """`files`: of the weights; None: they are random. Raises ConfigError."""
    if settings.engine.kv_port is None:
        return Transfer(memory=assembly.memory)
    if not cache.shares_prefixes:
        raise ConfigError("KV transfer needs the prefix cache: set prefix_cache, or leave kv_port out", param="kv_port")
    _check_mover(settings.engine.kv_mover, assembly)
    _check_ranks(assembly)
    secret, host = os.environ.get(SECRET_VARIABLE, ""), settings.server.host
    if not secret and not is_loopback_host(host):
        raise ConfigError("KV transfer beyond this machine needs gateway_secret", param="kv_port")
    layout, kind = _layout(config, files, assembly), settings.engine.kv_mover
    is_cpu = assembly.device.name == "cpu"
    memory, movers = (_on_cpu if is_cpu else _on_gpu)(kind, assembly, layout, secret)
    network = TcpNetwork(
        memory, uuid.uuid4().hex, secret, timeout_s=_PEER_S, movers=movers, sends_bytes=kind in ("auto", TCP)
    )
    port = network.listen(host, settings.engine.kv_port)
    mailbox.wake_on(network.descriptor)
    exchange = KvExchange(cache, network, timeout_s=_ENGINE_S)
    parked = assembly.memory
    if parked is not None and not is_cpu:
        parked = _LentMemory(parked, network)
    return Transfer(exchange, port, memory.layout.digest, tuple(network.mover_names), parked)


def _check_ranks(assembly: Assembly) -> None:
    """Raises ConfigError."""
    if assembly.parallelism.num_ranks - 1 != len(assembly.other_caches):
        raise ConfigError("KV transfer needs all ranks on one machine: leave kv_port out", param="kv_port")


def _check_mover(kind: str, assembly: Assembly) -> None:
    """Raises ConfigError."""
    is_cpu, kernels = assembly.device.name == "cpu", assembly.formats.kernels
    if not is_cpu and kernels != "triton":
        raise ConfigError(f"KV transfer on a GPU needs Triton's kernels, and these are {kernels}'s", param="kv_port")
    if kind in (("cuda",) if is_cpu else ("shm", "nixl")):
        where, others = ("CPU", "shm, nixl") if is_cpu else ("GPU", "cuda")
        raise ConfigError(f"kv_mover {kind} does not work on a {where}: {others} and tcp do", param="kv_mover")


def _on_cpu(kind: str, assembly: Assembly, layout: Layout, secret: str) -> tuple[BlockMemory, list[Mover]]:
    from penstock.runner.kv_memory import RankCache, SharedCache, host_memory, parts_of  # takes torch

    own, home = parts_of(assembly.kv), assembly.kv_home
    others = [each for each in assembly.other_caches if isinstance(each, RankCache)]
    memory = host_memory(own, layout, others)
    if kind == "nixl":
        try:
            return memory, [NixlMover(memory, timeout_s=_ENGINE_S)]
        except NixlMissing as error:
            raise ConfigError(str(error), param="kv_mover") from None
    if kind == TCP or not isinstance(home, SharedCache):
        return memory, []
    return memory, [SharedMemoryMover(memory, [home.file.lend(own), *(each.file for each in others)], secret)]


def _on_gpu(kind: str, assembly: Assembly, layout: Layout, secret: str) -> tuple[BlockMemory, list[Mover]]:
    from penstock.runner.cuda_driver import CudaDriver
    from penstock.runner.cuda_kv_memory import CudaMover, device_memory  # takes Triton
    from penstock.runner.mapped_memory import RankPool
    from penstock.runner.virtual_memory import VirtualMemory

    others = [each for each in assembly.other_caches if isinstance(each, RankPool)]
    memory, home = device_memory(assembly.kv, layout, others), assembly.kv_home
    if kind == TCP or not isinstance(home, VirtualMemory):
        return memory, []
    return memory, [CudaMover(memory, home, CudaDriver(memory.device), secret)]


class _LentMemory:
    """`Memory` of an engine whose KV cache others have mapped. They let go of it when it is parked, or it would not be
    given back; once it is awake they may have the new one."""

    def __init__(self, own: Memory, network: TcpNetwork) -> None:
        self._own, self._network = own, network

    def park(self) -> MemoryChange:
        self._network.withdraw()
        return self._own.park()

    def wake(self) -> MemoryChange:
        change = self._own.wake()
        self._network.offer_again()
        return change


def _layout(config: ModelConfig, files: Path | None, assembly: Assembly) -> Layout:
    weights = weights_identity(files) if files is not None else {}
    model = hashlib.sha256(msgspec.json.encode((config, weights), order="deterministic")).hexdigest()[:32]
    formats = assembly.formats
    return Layout(
        model,
        formats.kernels,
        formats.number_format,
        formats.quant,
        formats.kv_dtype,
        assembly.limits.block_size,
        assembly.parallelism.short,
        tuple(scale for layer in assembly.kv for scale in (layer.key_scale, layer.value_scale) if scale != 1.0),
    )
