"""Number formats of weights and cache: what was asked for, what the model's files have, what the device can."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from penstock.core.errors import ConfigError
from penstock.core.model_config import INT8_KV_SCALE_BYTES
from penstock.quant import Quant

FP8 = torch.float8_e4m3fn

_FIRST_WITH_FP8 = (8, 9)  # compute capability: Ada, Hopper and what came after

log = logging.getLogger("penstock.runner")


def fp8_obstacle(device: torch.device, *, has_triton: bool) -> str | None:
    """Reason why nothing can be in FP8 here; None: it can."""
    if device.type == "cpu":
        return "a CPU has no FP8 arithmetic"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_WITH_FP8:
        return "this GPU, of compute capability {}.{}, has no FP8 arithmetic".format(*capability)
    return None if has_triton else "FP8 needs Triton, which is not installed"


def resolve_quant(wanted: Literal["auto"] | Quant, stored: Quant | None, fp8_obstacle: str | None) -> Quant:
    """`stored` is the files' own format. Files in FP8 run anywhere, widened if need be; a wish is met or refused."""
    if wanted == "fp8" and fp8_obstacle:
        raise ConfigError(f"quant is fp8, but {fp8_obstacle}", param="quant")
    if wanted == "auto" and stored == "fp8" and fp8_obstacle:
        log.warning("the model's FP8 weights are widened: %s", fp8_obstacle)
        return "none"
    return (stored or "none") if wanted == "auto" else wanted


def int8_kv_obstacle(device: torch.device) -> str | None:
    """Reason why no cache can be in int8 here; None: it can."""
    return None if device.type == "cpu" else "a GPU has no kernels for such a cache; use fp8"


def resolve_kv_dtype(
    wanted: Literal["auto", "fp8", "int8"],
    activations: torch.dtype,
    fp8_obstacle: str | None,
    int8_obstacle: str | None = None,
) -> torch.dtype:
    if wanted == "auto":
        return activations
    obstacle = fp8_obstacle if wanted == "fp8" else int8_obstacle
    if obstacle:
        raise ConfigError(f"kv_dtype is {wanted}, but {obstacle}", param="kv_dtype")
    return FP8 if wanted == "fp8" else torch.int8


def kv_scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of scales for each key and value of a head; FP8 has one scale for a whole layer."""
    return INT8_KV_SCALE_BYTES if dtype is torch.int8 else 0


def name(dtype: torch.dtype) -> str:
    return "fp8" if dtype is FP8 else str(dtype).removeprefix("torch.")
