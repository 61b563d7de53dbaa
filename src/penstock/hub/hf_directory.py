"""A Hugging Face directory but for its weights: config.json, and the files of the tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles
from penstock.hub.hf_config import model_config
from penstock.hub.schemes import read_scheme

CONFIG = "config.json"
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True)
class HFDirectory:
    """Says what a model is like. It may hold no weights at all: for benchmarks, random ones do."""

    path: Path

    @cached_property
    def config(self) -> ModelConfig:
        return config_without_weights(self.read_config(), self.read_generation())

    @cached_property
    def tokenizer_source(self) -> TokenizerFiles:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise ModelUnsupported(
                f"{self.path} has no tokenizer.json; make one with "
                "`transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
            )
        config = {
            **read_json(self.path / "special_tokens_map.json"),
            **read_json(self.path / "tokenizer_config.json"),
        }
        return TokenizerFiles(path, config, self._chat_template(config))

    def read_config(self) -> dict[str, Any]:
        if not (self.path / CONFIG).is_file():
            raise ModelMissing(f"{self.path} has no {CONFIG}; give a Hugging Face model directory or a .gguf file")
        return read_json(self.path / CONFIG)

    def read_generation(self) -> dict[str, Any]:
        return read_json(self.path / "generation_config.json")

    def _chat_template(self, config: dict[str, Any]) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        # Models that take images have one for their processor, which older directories keep in a file of its own.
        template = read_json(self.path / "chat_template.json").get("chat_template") or config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
        return template


def config_without_weights(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Model config as config.json says it, where there are no weights to ask."""
    quantization = config.get("quantization_config")
    found = read_scheme(quantization).quantization if quantization else None
    return model_config(config, generation, has_head=True, quantization=found)


def read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        if (num_bytes := path.stat().st_size) > _MAX_JSON_BYTES:
            raise ModelCorrupt(f"{path} has {num_bytes:,} bytes; the most is {_MAX_JSON_BYTES:,}")
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} is not a JSON object; download it again")
    return value
