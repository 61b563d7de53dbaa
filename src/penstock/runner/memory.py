"""Size of the KV cache: a share of memory, less what everything else takes. Numbers in, blocks out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.core.errors import ConfigError
from penstock.core.host_memory import free_host_bytes

_CPU_TOKENS = 16_384  # that the cache of a CPU has room for, or a whole context, unless told otherwise
_CPU_FRACTION = 0.5  # of free memory: never more, even for that
_GPU_FRACTION = 0.9  # of all memory
# Steps of changing sizes leave holes in the allocator's memory, and a kernel that is compiled later takes some.
_GPU_MARGIN_BYTES = 256 << 20
_STAGED = 64  # one block in so many is memory for blocks on their way to the host and back
_MIN_STAGED = 4  # two for each way: while one is filled the other is emptied
_GIB = 1 << 30


@dataclass(frozen=True)
class GpuMemory:
    """A GPU's memory as its driver tells it, which counts all of a process, not only its tensors."""

    total_bytes: int
    free_before_bytes: int  # before this process put anything there: the rest is used by others
    free_bytes: int  # beside weights, graphs and all that the largest step takes: see `profile`

    @property
    def taken_bytes(self) -> int:
        return self.free_before_bytes - self.free_bytes


def blocks_on_gpu(memory: GpuMemory, block_bytes: int, *, fraction: float | None) -> int:
    """Number of blocks. `fraction` is of the device's memory, for all of this process; what others use is not ours."""
    fraction = fraction or _GPU_FRACTION
    left_bytes = min(int(fraction * memory.total_bytes) - memory.taken_bytes, memory.free_bytes)
    blocks = (left_bytes - _GPU_MARGIN_BYTES) // block_bytes
    if blocks < 1:
        taken, allowed, free = (
            f"{count / _GIB:.1f} GiB"
            for count in (memory.taken_bytes, fraction * memory.total_bytes, memory.free_before_bytes)
        )
        raise ConfigError(
            f"there is no memory left for a KV cache: the model and its largest step take {taken}, memory_fraction "
            f"allows {allowed}, and {free} were free. Raise memory_fraction, or lower chunk_tokens or max_num_seqs",
            param="memory_fraction",
        )
    return blocks


def blocks_on_cpu(
    context_length: int, block_size: int, block_bytes: int, *, fraction: float | None, state_bytes: int = 0
) -> int:
    """`fraction` is of free memory, for the cache alone: what weights take is taken already. `state_bytes`: of the
    recurrent states of sequences, which are a part of it."""
    room = int((fraction or _CPU_FRACTION) * free_bytes(torch.device("cpu")))
    if room < state_bytes:
        raise ConfigError(
            f"recurrent states take {state_bytes / _GIB:.1f} GiB, and {room / _GIB:.1f} GiB are for them and the KV "
            "cache: lower max_num_seqs, or raise memory_fraction",
            param="max_num_seqs",
        )
    blocks = (room - state_bytes) // block_bytes
    if fraction is None:
        blocks = min(blocks, -(-max(_CPU_TOKENS, context_length) // block_size))
    if blocks < 1:
        raise ConfigError("there is no memory left for a KV cache; free some, or use a smaller model")
    return blocks


def blocks_asked_for(kv_gib: float, most: int, block_bytes: int) -> int:
    """Number of blocks that were asked for, if there is room for them: for `most` blocks. Raises ConfigError."""
    blocks = int(kv_gib * _GIB) // block_bytes
    if not 1 <= blocks <= most:
        room, least = most * block_bytes / _GIB, block_bytes / _GIB
        what = f"but there is room for {room:.2f} GiB" if blocks else f"and one block takes {least:.4f} GiB"
        raise ConfigError(f"kv_gib is {kv_gib:g}, {what}", param="kv_gib")
    return blocks


def blocks_on_host(wanted_gib: float | None, block_bytes: int) -> int:
    """Number of blocks that were asked for, if the machine has room for them. Raises ConfigError."""
    free_gib = free_bytes(torch.device("cpu")) / _GIB
    if (wanted_gib or 0.0) > free_gib:
        message = f"host_kv_gib is {wanted_gib:g}, but only {free_gib:.1f} GiB of host memory are free"
        raise ConfigError(message, param="host_kv_gib")
    return int((wanted_gib or 0.0) * _GIB) // block_bytes


def staged(num_blocks: int) -> int:
    """Number of a GPU's blocks that are not for the cache, if it has more of it on the host."""
    count = max(num_blocks // _STAGED, _MIN_STAGED)
    if count >= num_blocks:
        message = f"there is room for {num_blocks} KV blocks, too few to share them with copies to and from the host"
        raise ConfigError(message, param="host_kv_gib")
    return count


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be taken: of the GPU's memory, or of the machine's and of the container's around us."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()
