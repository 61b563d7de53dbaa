"""Parallelism: over how many ranks a model is spread, and in which ways. Numbers only: the runner knows the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.expert_placement import num_slots
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings


@dataclass(frozen=True)
class Parallelism:
    """`tp` ranks split every layer (tensor parallel); with `ep`, whole experts are shared out among these. `pp` such
    groups have some of the layers each (pipeline parallel): the ranks of a group follow each other. `sp` neighbours
    among those `tp` have the same heads of keys and values, and share out the tokens of every sequence (sequence
    parallel)."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def chooser(self) -> int:
        """The rank that chooses tokens: the first of the last stage."""
        return self.tp * (self.pp - 1)

    @property
    def short(self) -> str:
        """The form of tables: TP2 PP2."""
        others = {"PP": self.pp, "EP": self.ep, "SP": self.sp}
        return " ".join([f"TP{self.tp}", *(f"{name}{size}" for name, size in others.items() if size > 1)])

    def __str__(self) -> str:
        named = {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep, "sequence": self.sp}
        return ", ".join(f"{name} parallel {size}" for name, size in named.items() if size > 1) or "one rank"


def parallelism_of(settings: EngineSettings, config: ModelConfig) -> Parallelism:
    """The parallelism that settings ask for, if it goes together; auto is 1 here: see `capacity` for what fits."""
    asked = Parallelism(settings.tp or 1, settings.pp or 1, settings.ep or 1, settings.sp or 1)
    if asked.ep > 1 and config.experts is None:
        raise ConfigError("ep is for mixtures of experts, and this model is none", param="ep")
    if asked.ep not in (1, asked.tp):
        raise ConfigError(f"ep is {asked.ep}: it must be 1, or as many as tp ({asked.tp})", param="ep")
    if asked.ep > 1 and config.experts is not None and config.experts.count < asked.ep:
        raise ConfigError(f"ep is {asked.ep}, but a layer has {config.experts.count} experts", param="ep")
    for name in ("redundant_experts", "expert_counts"):
        if getattr(settings, name) and asked.ep == 1:
            raise ConfigError(f"{name} is for whole experts that are shared out: it needs ep", param=name)
    if config.experts is not None and asked.ep > 1:
        num_slots(config.experts.count, asked.ep, settings.redundant_experts)
    if asked.tp % asked.sp:
        raise ConfigError(f"sp is {asked.sp}: it must divide tp ({asked.tp}), whose ranks share a sequence", param="sp")
    if asked.sp > 1 and config.latent is not None:
        message = f"sp is {asked.sp}, but ranks cannot share out the tokens of a model with latent attention (MLA)"
        raise ConfigError(f"{message}: use tp, pp or ep", param="sp")
    if asked.pp > config.num_layers:
        raise ConfigError(f"pp is {asked.pp}, but the model has {config.num_layers} layers", param="pp")
    return asked
