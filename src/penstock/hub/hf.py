"""A Hugging Face directory as a checkpoint: config.json, safetensors in one file or many, and the tokenizer's files."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import FloatArray, TokenizerFiles
from penstock.hub.hf_config import model_config
from penstock.hub.safetensors_file import SafetensorsFile

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HFCheckpoint:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not (directory / CONFIG).is_file():
            raise ModelMissing(f"{directory} has no {CONFIG}; give a Hugging Face model directory or a .gguf file")
        self._files = self._open_weights()
        names = frozenset(name for name in self._files if not name.endswith("rotary_emb.inv_freq"))
        if "model.embed_tokens.weight" not in names:
            raise ModelCorrupt(f"{directory} holds no model.embed_tokens.weight; it is not a complete language model")
        config = _read_json(directory / CONFIG)
        generation = _read_json(directory / "generation_config.json")
        self._config = model_config(config, generation, has_head="lm_head.weight" in names)
        self._names = names

    @property
    def path(self) -> Path:
        return self._directory

    @property
    def config(self) -> ModelConfig:
        return self._config

    @cached_property
    def tokenizer_source(self) -> TokenizerFiles:
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise ModelUnsupported(
                f"{self._directory} has no tokenizer.json; make one with "
                "`transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
            )
        config = {
            **_read_json(self._directory / "special_tokens_map.json"),
            **_read_json(self._directory / "tokenizer_config.json"),
        }
        return TokenizerFiles(path, config, self._chat_template(config))

    def tensor_names(self) -> frozenset[str]:
        return self._names

    def tensor(self, name: str) -> FloatArray:
        if name not in self._names:
            raise ModelCorrupt(f"{self._directory} has no tensor {name}; download the model again")
        return self._files[name].tensor(name)

    def _open_weights(self) -> dict[str, SafetensorsFile]:
        """Every tensor's file. Each shard is checked to be complete, and to hold what the index says."""
        if (self._directory / WEIGHTS).is_file():
            single = SafetensorsFile(self._directory / WEIGHTS)
            return dict.fromkeys(single.tensors, single)
        if not (self._directory / INDEX).is_file():
            raise ModelMissing(f"{self._directory} has neither {WEIGHTS} nor {INDEX}; only safetensors can be read")
        places = _read_json(self._directory / INDEX).get("weight_map", {})
        shards = {shard: SafetensorsFile(self._directory / shard) for shard in sorted(set(places.values()))}
        for name, shard in places.items():
            if name not in shards[shard].tensors:
                raise ModelCorrupt(f"{shard} does not hold {name}, which {INDEX} says it does; download it again")
        return {name: shards[shard] for name, shard in places.items()}

    def _chat_template(self, config: dict[str, Any]) -> str | None:
        file = self._directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
        return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ModelCorrupt(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} is not a JSON object; download it again")
    return value
