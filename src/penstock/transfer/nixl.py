"""KV blocks read by NIXL, NVIDIA's transfer library: by RDMA where the machines have it, else over UCX's own sockets.

It is the extra `penstock[nixl]`, imported only where `kv_mover` asks for it. The engine that lends has one agent for
its memory. The one that pulls makes an agent for each connection: an agent that lost its peer once is of no use any
more, and goes with the connection.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.transfer.host_memory import HostMemory, Ints, Parts
from penstock.transfer.messages import Count
from penstock.transfer.ports import RemoteMemory, Unreachable

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_HOST = "DRAM"
_POLL_S = 0.0002


class NixlMissing(Exception):
    """The library is not installed, or does not start here."""


class _Handle(msgspec.Struct, frozen=True):
    agent: bytes  # what the other side's agent needs to know of this one
    addresses: list[Count]  # of the parts of a block
    num_blocks: Count


_handle_decoder = msgspec.msgpack.Decoder(_Handle)


class NixlMover:
    """`Mover` by NIXL, from one host memory to another."""

    name = "nixl"
    is_local = False
    message_bytes = 64 << 20

    def __init__(self, memory: HostMemory, *, timeout_s: float) -> None:
        """`timeout_s`: for one copy. Raises NixlMissing."""
        self._memory, self._timeout_s = memory, timeout_s
        self._api = _import_api()
        self._lock = threading.Lock()
        self._lender: Any = None  # an agent

    def offer(self) -> bytes:
        parts = self._memory.parts
        with self._lock:
            if self._lender is None:
                self._lender = self.make_agent()
            agent = self._lender.get_agent_metadata()
        return msgspec.msgpack.encode(_Handle(agent, parts.addresses.tolist(), parts.num_blocks))

    def open(self, handle: bytes) -> RemoteMemory:
        try:
            said = _handle_decoder.decode(handle)
        except msgspec.MsgspecError as error:
            raise Unreachable(str(error)) from None
        if len(said.addresses) != len(self._memory.parts.sizes):
            raise Unreachable("its memory has other parts")
        agent = self.make_agent()
        try:
            peer = agent.add_remote_agent(said.agent)
        except Exception as error:  # NIXL's own, which have no common base
            raise Unreachable(f"NIXL: {error}") from None
        return _NixlMemory(self._memory, agent, peer, said, self._timeout_s)

    def close(self) -> None:
        with self._lock:
            self._lender = None

    def make_agent(self) -> Any:
        """One that knows this engine's memory. Raises Unreachable."""
        try:
            agent = self._api.nixl_agent(uuid4().hex, self._api.nixl_agent_config(backends=["UCX"]))
            parts = self._memory.parts
            regions = [(*each, 0, "") for each in zip(parts.addresses.tolist(), map(len, parts.wholes), strict=True)]
            agent.register_memory(regions, _HOST)
        except Exception as error:
            raise Unreachable(f"NIXL: {error}") from None
        return agent


class _NixlMemory:
    """`RemoteMemory`: the other engine's, as our agent reads it."""

    def __init__(self, memory: HostMemory, agent: Any, peer: Any, said: _Handle, timeout_s: float) -> None:
        self._memory, self._agent, self._peer, self._timeout_s = memory, agent, peer, timeout_s
        self._addresses: Ints = np.array(said.addresses, np.int64)
        self._num_blocks = said.num_blocks

    def copy(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        if max(theirs) >= self._num_blocks:
            raise Unreachable("its memory has no such block")
        parts, agent = self._memory.parts, self._agent
        try:
            here = agent.get_xfer_descs(pieces(parts, parts.addresses, ours), _HOST)
            there = agent.get_xfer_descs(pieces(parts, self._addresses, theirs), _HOST)
            transfer = agent.initialize_xfer("READ", here, there, self._peer)
        except Exception as error:
            raise Unreachable(f"NIXL: {error}") from None
        try:
            self._wait(transfer)
        finally:
            agent.release_xfer_handle(transfer)  # which ends it, if it has not ended

    def _wait(self, transfer: Any) -> None:
        until_s = time.monotonic() + self._timeout_s
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC" and time.monotonic() < until_s:
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(transfer)
        except Exception as error:
            raise Unreachable(f"NIXL: {error}") from None
        if state != "DONE":
            raise Unreachable(f"NIXL: the copy is {state} after {self._timeout_s:g} s")

    def close(self) -> None:
        self._agent = None  # all that it had mapped goes with it


def pieces(parts: Parts, addresses: Ints, block_ids: Sequence[int]) -> npt.NDArray[np.uint64]:
    """[pieces, 3]: where each is, how long, and on which device, part by part."""
    ids = np.array(block_ids, np.int64)
    begins = addresses[:, None] + ids * parts.sizes[:, None]
    lengths = np.broadcast_to(parts.sizes[:, None], begins.shape)
    return np.stack([begins.ravel(), lengths.ravel(), np.zeros(begins.size, np.int64)], axis=1).astype(np.uint64)


def _import_api() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise NixlMissing("NIXL is not installed: pip install 'penstock[nixl]'")
