"""Facts about the GPU that kernels of all shapes are chosen and tiled by; nothing here runs on it. Where Triton
interprets kernels there is no GPU, and little is asked for."""

from __future__ import annotations

import os
from functools import cache

import torch


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Triton reads this when kernels are defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_ptx() -> bool:
    """Whether kernels may use a GPU's own instructions."""
    return not is_interpreted()


@cache
def capability(device: torch.device | None = None) -> tuple[int, int]:
    """The compute capability of this GPU, or of the current one; (0, 0): there is none."""
    return torch.cuda.get_device_capability(device) if _has_gpu() else (0, 0)


@cache
def num_processors(device: torch.device | None = None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if _has_gpu() else 1


def _has_gpu() -> bool:
    return not is_interpreted() and torch.cuda.is_available()
