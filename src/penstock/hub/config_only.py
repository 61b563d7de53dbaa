"""Model configs without weights: from config.json, in a directory, by its path or on the Hub, or from a GGUF."""

from __future__ import annotations

from penstock.core.model_config import ModelConfig
from penstock.hub.hf_directory import config_without_weights, read_json
from penstock.hub.hf_download import HF_PREFIX, HubSource
from penstock.hub.progress import Progress
from penstock.hub.resolve import describe
from penstock.hub.sources import local_path, repository_of, url_source


def read_config(spec: str, *, progress: Progress | None = None) -> ModelConfig:
    """Downloads no weights, but for an alias: that is a single file."""
    path = local_path(spec)
    if spec.startswith(HF_PREFIX):
        return config_without_weights(HubSource(repository_of(spec)).read_config(), {})
    if (source := url_source(spec)) is not None and not source.is_file:
        return config_without_weights(source.read_config(), {})
    if path.suffix == ".json" and path.is_file():
        return config_without_weights(read_json(path), {})
    return describe(spec, progress=progress).config
