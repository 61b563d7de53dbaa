"""The shapes of `capacity`, for benches that need no weights, with the context that they were measured at elsewhere."""

from __future__ import annotations

from dataclasses import replace

from penstock.capacity import shapes
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig

CONTEXT = 8192
SHAPES = {name: replace(config, context_length=CONTEXT) for name, config in shapes.SHAPES.items()}


def shape(name: str, num_layers: int | None = None) -> ModelConfig:
    """`num_layers`: fewer than it has, of a model that is too large for the device. Raises ConfigError."""
    found = replace(shapes.shape(name), context_length=CONTEXT)
    if num_layers is None:
        return found
    if num_layers > found.num_layers:
        raise ConfigError(f"{name} has {found.num_layers} layers", param="layers")
    return replace(found, num_layers=num_layers)
