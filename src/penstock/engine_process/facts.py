"""What follows from a model on a device: by which weights its steps are split, and how many bytes each must read."""

from __future__ import annotations

from penstock.capacity.formats import BYTES, Formats
from penstock.capacity.hardware import Peaks, by_driver_name
from penstock.capacity.model_bytes import ModelBytes
from penstock.core.model_config import ModelConfig
from penstock.sched.cost import Work

# Operations that a device does in the time in which it reads a byte: an H200's by its measured peaks, and a CPU core's
# by what its steps took (`python -m tools.cost`).
_FLOPS_PER_BYTE = {"cuda": 173.0, "cpu": 12.0}


def work_of(config: ModelConfig, device: str, kv_token_bytes: int, peaks: Peaks | None) -> Work:
    """In operations; what is read counts as the operations that could have been done meanwhile."""
    model = ModelBytes(config)
    flops_per_byte = _FLOPS_PER_BYTE["cuda" if device.startswith("cuda") else "cpu"]
    if peaks is not None:
        flops_per_byte = peaks.flops_per_s["bfloat16"] / peaks.bytes_per_s
    return Work(
        token=model.linear_flops_per_token,
        choice=model.head_flops_per_token,
        read=kv_token_bytes * flops_per_byte,
        pair=model.flops_per_pair,
    )


def weight_bytes(config: ModelConfig, number_format: str, quant: str) -> int:
    """Read in every step; 0: nobody has said how large this format is."""
    linear = number_format if quant == "none" else quant
    if linear not in BYTES or number_format not in BYTES:
        return 0
    return ModelBytes(config, Formats(linear, dtype=number_format)).read_bytes


def peaks_of(device_name: str) -> Peaks | None:
    gpu = by_driver_name(device_name)
    return gpu.measured if gpu is not None else None
