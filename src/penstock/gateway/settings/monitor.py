"""From an operator's file to what the watch needs: the objectives of every pool, and an address that is a secret."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.gateway.settings.gateway import ModelSettings, pools_of
from penstock.watch.settings import AlertSettings


def slos_of(default: Slo, models: dict[str, ModelSettings]) -> Mapping[str, Slo]:
    """Objectives by pool: a model's own, in the place of those of all."""
    return {
        name: build(Slo, asdict(default) | pool.slo, where=f"models.{name}.slo.")
        for name, pool in pools_of(models).items()
    }


def slack_of(settings: AlertSettings) -> str | None:
    if settings.slack_env is None:
        return settings.slack
    found = os.environ.get(settings.slack_env)
    if not found:
        raise ConfigError(f"the environment has no {settings.slack_env}", param="watch.alerts.slack_env")
    return found
