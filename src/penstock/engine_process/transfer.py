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
from penstock.core.settings import Settings
from penstock.engine.mailbox import Mailbox
from penstock.hub.weights_identity import weights_identity
from penstock.kv.cache import KVCache
from penstock.transfer.exchange import KvExchange
from penstock.transfer.host_memory import HostMemory
from penstock.transfer.messages import Layout
from penstock.transfer.nixl import NixlMissing, NixlMover
from penstock.transfer.ports import Mover
from penstock.transfer.shared_memory import MemoryFile, SharedMemoryMover
from penstock.transfer.tcp import TCP, TcpNetwork

if TYPE_CHECKING:
    from penstock.runner.assemble import Assembly

_PEER_S = 5.0  # of silence of another process, after which it is gone
_ENGINE_S = 30.0  # the same of the engine in it: its steps may take long


class Transfer(NamedTuple):
    exchange: KvExchange | None = None  # None: no KV blocks come or go
    port: int = 0
    layout: str = ""  # a digest
    movers: tuple[str, ...] = ()  # the best first


def make_transfer(
    settings: Settings, config: ModelConfig, files: Path | None, assembly: Assembly, cache: KVCache, mailbox: Mailbox
) -> Transfer:
    """`files`: of the weights; None: they are random. Raises ConfigError."""
    if settings.engine.kv_port is None:
        return Transfer()
    if not cache.shares_prefixes:
        raise ConfigError("KV transfer needs the prefix cache: set prefix_cache, or leave kv_port out", param="kv_port")
    if assembly.parallelism.num_ranks > 1:
        raise ConfigError("KV transfer is not built for several ranks yet: leave kv_port out", param="kv_port")
    if assembly.device.name != "cpu":
        raise ConfigError("KV transfer is not built for GPUs yet: leave kv_port out", param="kv_port")
    secret, host = os.environ.get(SECRET_VARIABLE, ""), settings.server.host
    if not secret and not is_loopback_host(host):
        raise ConfigError("KV transfer beyond this machine needs gateway_secret", param="kv_port")
    from penstock.runner.kv_memory import host_memory  # takes torch

    memory = host_memory(assembly.kv, _layout(config, files, assembly))
    network = TcpNetwork(
        memory,
        uuid.uuid4().hex,
        secret,
        timeout_s=_PEER_S,
        movers=_movers(settings.engine.kv_mover, memory, assembly.kv_file, secret),
        sends_bytes=settings.engine.kv_mover in ("auto", TCP),
    )
    port = network.listen(host, settings.engine.kv_port)
    mailbox.wake_on(network.descriptor)
    exchange = KvExchange(cache, network, timeout_s=_ENGINE_S)
    return Transfer(exchange, port, memory.layout.digest, tuple(network.mover_names))


def _movers(kind: str, memory: HostMemory, file: MemoryFile | None, secret: str) -> list[Mover]:
    if kind == "nixl":
        try:
            return [NixlMover(memory, timeout_s=_ENGINE_S)]
        except NixlMissing as error:
            raise ConfigError(str(error), param="kv_mover") from None
    return [SharedMemoryMover(memory, file, secret)] if file is not None else []


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
        assembly.parallelism.num_ranks,
        tuple(scale for layer in assembly.kv for scale in (layer.key_scale, layer.value_scale) if scale != 1.0),
    )
