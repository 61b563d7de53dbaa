"""Settings of several models that one server has: the file of `penstock serve --models FILE`.

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

Gib = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class ModelEntry:
    """One of the models."""

    model: str = setting("", "name, directory or file of the model, as for `penstock serve`; auto: its name here")
    engine: dict[str, Any] = setting({}, "settings of its engine that are not those of all models")
    server: dict[str, Any] = setting({}, "settings of its server that are not those of all models")
    slo: dict[str, Any] = setting({}, "objectives that are not those of all models")


@dataclass(frozen=True)
class ModelsSettings:
    models: dict[str, Any] = setting({}, "the models by the names that clients use: a model, or settings of one")

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
