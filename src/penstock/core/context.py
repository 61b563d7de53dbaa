"""The longest context that an engine may be asked for."""

from __future__ import annotations

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings


def longest_context(settings: EngineSettings, config: ModelConfig) -> int:
    """Tokens of prompt and output, by the settings; raises where the model has no rotary angles for so many."""
    wanted = settings.max_model_len or config.context_length
    if wanted > config.context_length:
        message = f"max_model_len is {wanted}, but the model's context ends at {config.context_length}"
        raise ConfigError(message, param="max_model_len")
    return wanted
