"""What a replica says of itself to a gateway, which makes its snapshot of it. Plain facts; what follows is policy.

A report is a moment old when it is read. `steps` standing still while sequences run means that the engine hangs; a
different `boot` means another process, with an empty cache.
"""

from __future__ import annotations

import msgspec

from penstock.core.devices import DeviceReading


class AdapterNews(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that a replica serves beside its model."""

    name: str
    digest: str  # of its content
    is_on_device: bool = False  # else it takes a moment to get there


class ReplicaReport(msgspec.Struct, frozen=True):
    boot: str  # of this server process
    model: str
    state: str  # of the engine: starting, ready, restarting, failed, stopped
    is_draining: bool = False  # takes no new work

    num_open: int = 0  # choices that the server has taken and not finished
    num_waiting: int = 0  # sequences
    num_running: int = 0
    queued_tokens: int = 0  # known and still to be computed before their sequences can generate
    kv_active_tokens: int = 0  # in blocks that sequences hold; what is merely cached counts as free
    kv_capacity_tokens: int = 0

    steps: int = 0  # of the engine since its start
    restarts: int = 0  # of the engine
    prefill_tokens_per_s: float | None = None  # None: not measured yet
    decode_step_s: float | None = None  # a step in which every sequence made one token

    max_open: int = 0
    max_num_seqs: int = 0
    chunk_tokens: int = 0
    max_model_len: int = 0
    block_size: int = 0
    text: str = ""  # the digest of its `TokenizerBundle`; empty: it cannot be had yet

    generated_tokens: int = 0  # by the engine since its start, as the two that follow
    prompt_tokens: int = 0  # looked up in the prefix cache
    cached_tokens: int = 0  # of them, found there
    version: str = ""  # of penstock
    busy_s: float = 0.0  # time in which the device has worked for the engine since its start

    devices: tuple[DeviceReading, ...] = ()  # as they were last read, once a second; none: nothing is known of them
    device_fault: str = ""  # why one of them gets no more work; it is draining then

    kv_fragmentation: float = 0.0  # the part of the room in sequences' blocks that has no token in it
    memory_kills: int = 0  # of the engine, by the kernel
    adapters: tuple[AdapterNews, ...] = ()
    host_tokens_per_s: float | None = None  # whose keys and values come back from host memory; None: not measured
