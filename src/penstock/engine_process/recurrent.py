"""Features that an engine refuses for a model with a recurrent state, by name, before anything loads.

A state has no history: it cannot go back to an earlier token, as drafts that do not hold would need, and it lies in no
KV block, so blocks alone let no other sequence, replica or restart go on from them.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings


def for_recurrent(settings: EngineSettings, config: ModelConfig, draft: ModelConfig | None = None) -> EngineSettings:
    """Settings with what is `auto` off where a recurrent state rules it out. `draft`: of a model to draft with."""
    if draft is not None and draft.linear is not None:
        told = "a model with a recurrent state cannot draft: it would have to forget drafts that do not hold"
        raise ConfigError(f"{told}; draft with another, or with none", param="draft")
    if config.linear is None:
        return settings
    for param, wanted, what in (
        ("speculate", settings.speculate not in ("auto", "off"), "speculative decoding: drafts may have to be undone"),
        ("draft", settings.draft is not None, "speculative decoding: drafts may have to be undone"),
        ("host_kv_gib", settings.host_kv_gib is not None, "KV blocks in host memory: they would be found without it"),
        ("disk_kv_gib", settings.disk_kv_gib is not None, "KV blocks on disk: they would be found without it"),
        ("kv_port", settings.kv_port is not None, "KV transfer: blocks would come and go without it"),
        ("sp", (settings.sp or 1) > 1, "sequence parallelism: all of its tokens pass through it in their order"),
    ):
        if wanted:
            raise ConfigError(f"this model's sequences have a recurrent state, which rules out {what}", param=param)
    return replace(settings, speculate="off")


def check_stages(config: ModelConfig, stages: list[range]) -> None:
    """Raises ConfigError for a pipeline with a stage that has no KV cache at all."""
    for number, layers in enumerate(stages):
        if config.linear is not None and all(map(config.is_linear, layers)):
            raise ConfigError(
                f"stage {number} of {len(stages)} would have linear layers alone (layers {layers.start} to "
                f"{layers.stop - 1}), and each needs one that attends: use fewer",
                param="pp",
            )
