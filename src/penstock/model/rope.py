"""Rotary embeddings: how fast each pair of a head's dimensions turns, and the angle tables that follow from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig, RopeScaling
from penstock.model.ops import Rope


def rope_tables(config: ModelConfig, device: torch.device) -> Rope:
    """Angles of every position up to the model's context, computed in float32 whatever the activations are."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    positions = torch.arange(config.context_length, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # [context, head_dim / 2]
    return Rope(cos=angles.cos().to(device), sin=angles.sin().to(device))


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each rotated pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case "factors":
            return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow pairs are slowed by the whole factor, fast ones kept, those between blended by their turns per context."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # over the context the model was trained on
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)
