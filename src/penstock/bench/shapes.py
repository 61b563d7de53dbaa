"""The shapes of `capacity`, for benches that need no weights, with the context that they were measured at elsewhere."""

from __future__ import annotations

from dataclasses import replace

from penstock.capacity import shapes
from penstock.core.model_config import ModelConfig

CONTEXT = 8192
SHAPES = {name: replace(config, context_length=CONTEXT) for name, config in shapes.SHAPES.items()}


def shape(name: str) -> ModelConfig:
    return replace(shapes.shape(name), context_length=CONTEXT)
