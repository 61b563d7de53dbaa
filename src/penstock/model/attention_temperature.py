"""Attention whose queries grow with their position, so that long contexts do not flatten it (Llama 4, Ministral 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.model.batch import Batch
from penstock.model.layers import Attention
from penstock.model.ops import LayerKV, Stream


@dataclass(frozen=True, slots=True)
class TemperedAttention:
    """Attention whose queries are scaled by their positions before it."""

    attention: Attention
    scales: Tensor  # [context] float32

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        own, ops = self.attention, self.attention.ops
        qkv = ops.norm_linear(stream, own.norm, own.qkv)
        qkv[:, : own.spec.num_heads * own.spec.head_dim] *= self.scales[batch.positions, None]
        ops.add_linear(stream, ops.attention(qkv, own.spec, own.rope, kv, batch), own.output)


def query_scales(config: ModelConfig, device: torch.device, max_context: int | None) -> Tensor | None:
    """Factor of the query at each position; None: all are one. It is a table because a row's result must not depend on
    where in a batch the row lies."""
    tuning = config.temperature
    if tuning is None:
        return None
    count = min(config.context_length, max_context or config.context_length)
    positions = torch.arange(tuning.first, count + tuning.first, dtype=torch.float64)
    return (1 + tuning.scale * torch.log1p(positions // tuning.tokens)).float().to(device)
