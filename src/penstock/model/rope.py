"""Rotary embeddings: how fast each pair of a head's dimensions turns, and the angle tables that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.model_config import ModelConfig, RopeScaling
from penstock.model.ops import Rope


def layer_ropes(config: ModelConfig, device: torch.device, max_context: int | None = None) -> Callable[[int], Rope]:
    """The tables of each layer."""
    tables = still_tables if config.rope_sections else rope_tables
    rope = tables(config, device, max_context)
    still = still_tables(config, device, max_context) if config.unrotated_layers else rope
    local = rope
    if config.local_rope_theta is not None:
        nearby = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
        local = rope_tables(nearby, device, max_context)

    def of(layer: int) -> Rope:
        if layer in config.unrotated_layers:
            return still
        return rope if config.window(layer) is None else local

    return of


def rope_tables(config: ModelConfig, device: torch.device, max_context: int | None = None) -> Rope:
    """Angles of every position up to the model's context, computed in float32 whatever the activations are."""
    if config.latent is not None:  # its rotated part alone
        config = replace(config, head_dim=config.latent.rotary_dim, latent=None)
    rotary_dim, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
    if scaling and scaling.kind == "longrope":
        scaling = _one_set(scaling, max_context or config.context_length)
    frequencies = inverse_frequencies(rotary_dim, config.rope_theta, scaling)
    positions = torch.arange(_num_positions(config, max_context), dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # [context, rotary_dim / 2]
    magnitude = scaling.magnitude if scaling else 1.0
    still = (config.head_dim - rotary_dim) // 2  # pairs that do not turn: see `paired_rows`
    cos = F.pad(angles.cos() * magnitude, (0, still), value=1.0)
    sin = F.pad(angles.sin() * magnitude, (0, still), value=0.0)
    return Rope(cos=cos.to(device), sin=sin.to(device))


def still_tables(config: ModelConfig, device: torch.device, max_context: int | None = None) -> Rope:
    """Angles of zero: heads are rotated before kernels see them (see `model.mrope`), or not at all."""
    shape = (_num_positions(config, max_context), config.head_dim // 2)
    return Rope(cos=torch.ones(shape, device=device), sin=torch.zeros(shape, device=device))


def _num_positions(config: ModelConfig, max_context: int | None) -> int:
    """A model of ten million tokens has tables of gigabytes, of which most serve nobody."""
    return min(config.context_length, max_context or config.context_length)


def paired_rows(head_dim: int, rotary_dim: int, *, neighbours: bool = False) -> Tensor:
    """Order of a head's dimensions in which its two halves are the pairs that are rotated together, each half with
    unrotated ones behind. It is for heads of which only the first dimensions are rotated, or whose `neighbours` are
    rotated together. q and k have the same order, and so the same products."""
    turning, rest = torch.arange(head_dim).split_with_sizes([rotary_dim, head_dim - rotary_dim])
    first, second = turning.view(-1, 2).unbind(1) if neighbours else turning.chunk(2)
    still = rest.chunk(2)
    return torch.cat((first, still[0], second, still[1]) if rest.numel() else (first, second))


def _one_set(scaling: RopeScaling, max_context: int) -> RopeScaling:
    """One of two sets of factors, for all sequences: were it to change as a sequence grows, what its cache holds would
    have to be computed anew, and no other could share it."""
    is_long = max_context > scaling.original_context
    return replace(scaling, kind="factors", factors=scaling.long_factors if is_long else scaling.factors)


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
        case "yarn":
            return _yarn(frequencies, theta, scaling)
        case "factors" | "longrope":
            return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow pairs are slowed by the whole factor, fast ones kept, those between blended by their turns per context."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # over the context the model was trained on
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Fast pairs are kept, slow ones slowed by the whole factor, those between blended by their number."""
    num_pairs = len(frequencies)

    def pair(turns: float) -> float:
        """Index of the pair that turns so often in the original context."""
        return num_pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    last += 0.001 if first == last else 0.0
    slowed = ((torch.arange(num_pairs, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * slowed + frequencies * (1.0 - slowed)
