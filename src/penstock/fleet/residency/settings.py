"""Settings of several models that one server has: the file of `penstock serve --models FILE`.

memory_gib: 20
models:
  chat: smollm2
  code: {model: "hf:Qwen/Qwen3-8B", pinned: true, engine: {max_model_len: 8192}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from penstock.core.config import build, within
from penstock.core.errors import ConfigError
from penstock.core.settings import setting
from penstock.core.slo import Seconds

Gib = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class ModelEntry:
    """One of the models."""

    model: str = setting("", "name, directory or file of the model, as for `penstock serve`; auto: its name here")
    pinned: bool = setting(False, "it is loaded at the start and never leaves the device")
    weights_gib: Gib | None = setting(
        None, "memory of its weights on the device; auto: by the size of its files, or its shape and number format"
    )
    kv_floor_gib: Gib | None = setting(
        None, "KV cache that it always has while it is loaded; auto: 4,096 tokens, or its whole context if that is less"
    )
    kv_share: Annotated[float, Meta(gt=0)] = setting(
        1.0, "of the memory that floors leave, by comparison with the shares of other models"
    )
    engine: dict[str, Any] = setting({}, "settings of its engine that are not those of all models")
    server: dict[str, Any] = setting({}, "settings of its server that are not those of all models")
    slo: dict[str, Any] = setting({}, "objectives that are not those of all models")


@dataclass(frozen=True)
class ModelsSettings:
    models: dict[str, Any] = setting({}, "the models by the names that clients use: a model, or settings of one")
    memory_gib: Gib | None = setting(
        None, "memory of the device for all models together; auto: 0.9 of a GPU's, or 0.8 of what a machine has free"
    )
    min_residence_s: Seconds = setting(
        30.0, "how long a model that was loaded stays at least before another may take its memory"
    )
    load_on_use: bool = setting(True, "load a model for the first request that names it; false: by order only")
    hold_s: Seconds = setting(300.0, "how long a request waits at most for its model to be loaded")
    idle_s: Seconds | None = setting(
        None, "a model without requests for so long leaves the device; none: only when its memory is needed"
    )
    admin_port: Annotated[int, Meta(ge=0, le=65535)] | None = setting(
        None,
        "port of loopback for the console, orders and metrics; auto: the models' own, a free one if that is public",
    )
    parks: bool = setting(
        True, "a model that leaves is parked where that frees enough: it is back sooner; false: it is unloaded"
    )
    mps: bool = setting(
        True,
        "on a GPU, kernels of several models run side by side, where NVIDIA's MPS is installed; false: in turns, and a "
        "kernel's fault costs one model and not all",
    )

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("name at least one model", param="models")

    def entries(self) -> Mapping[str, ModelEntry]:
        """Raises ConfigError."""
        found = {}
        for name, value in self.models.items():
            values = {"model": value} if isinstance(value, str) else value if value is not None else {}
            if not isinstance(values, Mapping):
                raise ConfigError("it is a model, or settings of one", param=f"models.{name}")
            with within(f"models.{name}."):
                found[name] = build(ModelEntry, {"model": name} | dict(values), where=f"models.{name}.")
        return found
