"""The directory that `penstock quantize` fills, a file per layer: a run that was killed goes on behind the last whole
one. quantize.json, written first, says what the run is to make; config.json, written last, that all is there.

Knows files and names, not how weights get small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.files import write_file
from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.convert import hf_config, write_tokenizer
from penstock.hub.disk import locked, publish
from penstock.hub.hf import INDEX
from penstock.hub.hf_directory import CONFIG, HFDirectory, read_json
from penstock.hub.quantization import Json, Scheme, Tensors
from penstock.hub.safetensors_file import DType, SafetensorsFile, Written, write_tensors
from penstock.hub.schemes import read_scheme
from penstock.hub.stored import FloatArray, Stored

STATE = "quantize.json"
LOCK = ".quantize.lock"
STARVED = "starved"  # a note in a layer's file
# Files that lie beside a model's weights and are none of them.
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
)


@dataclass(frozen=True)
class QuantizedDirectory:
    path: Path
    num_layers: int

    @classmethod
    @contextmanager
    def opened(
        cls, path: Path, making: Json, num_layers: int, *, on_wait: Callable[[], None] = lambda: None
    ) -> Iterator[QuantizedDirectory]:
        """New, or the one that an earlier run with the same arguments left; no other run may have it meanwhile."""
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; give a directory to write to")
        state = read_json(path / STATE) if path.is_dir() else {}
        if not state and path.is_dir() and {file.name for file in path.iterdir()} - {LOCK, f"{STATE}.part"}:
            raise ConfigError(f"{path} is not empty, and `penstock quantize` did not make it; give another directory")
        if state and state != dict(making):
            differing = sorted(key for key in state.keys() | making.keys() if state.get(key) != making.get(key))
            raise ConfigError(
                f"{path} holds another quantization (it differs in {', '.join(differing)}); remove it or give another"
            )
        path.mkdir(parents=True, exist_ok=True)
        with locked(path / LOCK, on_wait=on_wait):
            if not state:
                _publish_json(path / STATE, making)
            yield cls(path, num_layers)
        (path / LOCK).unlink(missing_ok=True)

    @property
    def is_complete(self) -> bool:
        return (self.path / CONFIG).is_file()

    def shard(self, index: int) -> Path:
        """File of a layer; the one after the last has all the rest."""
        total = self.num_layers + 1
        return self.path / f"model-{index + 1:05}-of-{total:05}.safetensors"

    def write(self, index: int, tensors: Mapping[str, Written], starved: Sequence[str] = ()) -> None:
        """`starved` are the experts that no data was fitted to: too little reached them."""
        notes = {STARVED: " ".join(starved)} if starved else {}
        write_tensors(self.shard(index), tensors.items(), len(tensors), notes)

    def starved(self) -> list[str]:
        """Names of starved experts in all layers that are written."""
        shards = (self.shard(index) for index in range(self.num_layers + 1))
        return [name for shard in shards for name in SafetensorsFile(shard).notes.get(STARVED, "").split()]

    def finish(
        self,
        checkpoint: Checkpoint,
        quantization: Json,
        dtype: DType,
        tokenizer_json: str,
        special_tokens: Mapping[str, str],
    ) -> None:
        shards = [SafetensorsFile(self.shard(index)) for index in range(self.num_layers + 1)]
        places = {name: shard.path.name for shard in shards for name in shard.tensors}
        total = sum(info.num_bytes for shard in shards for info in shard.tensors.values())
        _publish_json(self.path / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        if isinstance(checkpoint.tokenizer_source, TokenizerMetadata):
            config = hf_config(checkpoint.config, dtype)
            write_tokenizer(checkpoint, self.path, tokenizer_json, special_tokens)
        else:
            config = HFDirectory(checkpoint.path).read_config()
            if "text_config" in config or "vision_config" in config:  # it takes images: what is written does not
                config = hf_config(checkpoint.config, dtype)
            for name in CARRIED:
                if (checkpoint.path / name).is_file():
                    write_file(self.path / name, (checkpoint.path / name).read_bytes())
        config |= dict.fromkeys(("torch_dtype", *(["dtype"] if "dtype" in config else [])), dtype)
        _publish_json(self.path / CONFIG, {**config, "quantization_config": dict(quantization)})


@dataclass(frozen=True)
class ShardFile:
    """One file of the directory as a checkpoint: enough to read its layer from, while there is no config.json yet."""

    path: Path
    config: ModelConfig
    scheme: Scheme

    @classmethod
    def of(cls, path: Path, config: ModelConfig, quantization: Json) -> ShardFile:
        return cls(path, config, read_scheme(quantization))

    @property
    def tokenizer_source(self) -> TokenizerFiles | TokenizerMetadata:
        raise NotImplementedError("a shard has no tokenizer")

    @cached_property
    def _tensors(self) -> Tensors:
        file = SafetensorsFile(self.path)
        return Tensors(file.tensors, file.stored, file.integers)

    def tensor_names(self) -> frozenset[str]:
        names = self._tensors.names
        return frozenset(name for name in names if name.endswith((".weight", ".bias"))) | self.scheme.weights(names)

    def stored(self, name: str) -> Stored:
        info = self._tensors.infos.get(name)
        is_plain = info is not None and info.code not in ("F8_E4M3", "I8")
        return self._tensors.floats(name) if is_plain else self.scheme.stored(name, self._tensors)

    def tensor(self, name: str) -> FloatArray:
        return self.stored(name).widened()

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0


def fingerprint(path: Path) -> dict[str, int]:
    """The sizes of a model's files: enough to tell that it is not the one of the last run."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {file.name: file.stat().st_size for file in files}


def tensor_bytes(path: Path) -> Iterator[tuple[str, int]]:
    """Yields name and size of every tensor in a directory's files."""
    for file in sorted(path.glob("*.safetensors")):
        for name, info in SafetensorsFile(file).tensors.items():
            yield name, info.num_bytes


def _publish_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".part")
    write_file(partial, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    publish(partial, path)
