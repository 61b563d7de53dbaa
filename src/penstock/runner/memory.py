"""How large the KV cache may be. Weights are loaded first; the cache gets a share of what is left, and no more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig

_CPU_TOKENS = 16_384  # that the cache of a CPU has room for, or a whole context, unless told otherwise
_CPU_FRACTION = 0.5  # of free memory: never more, even for that
_GPU_FRACTION = 0.9


def free_bytes(device: torch.device) -> int:
    """What can still be taken: of the GPU's memory, or of the machine's and of the container's around us."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_on_machine(), _free_in_container())


def _free_on_machine() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    limit, used = _lines(cgroup / "memory.max"), _lines(cgroup / "memory.current")
    if not limit or not used or limit[0] == "max":
        return sys.maxsize
    return max(0, int(limit[0]) - int(used[0]))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def num_blocks(
    config: ModelConfig, block_size: int, *, bytes_per_value: int, device: torch.device, fraction: float | None
) -> int:
    """Blocks that fit; a model with room for less than one block is refused."""
    block_bytes = block_size * config.kv_bytes_per_token(bytes_per_value)
    share = fraction or (_GPU_FRACTION if device.type == "cuda" else _CPU_FRACTION)
    blocks = int(share * free_bytes(device)) // block_bytes
    if fraction is None and device.type == "cpu":
        blocks = min(blocks, -(-max(_CPU_TOKENS, config.context_length) // block_size))
    if blocks < 1:
        raise ConfigError("there is no memory left for a KV cache; free some, or use a smaller model")
    return blocks
