"""A Hugging Face directory as a checkpoint: config.json, safetensors in one file or many, and the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles
from penstock.hub.families import CHOICE_BIAS, FAMILY_FILES, ExpertNames
from penstock.hub.fp8 import check_scales, kv_scale_names
from penstock.hub.granite_names import granite_places
from penstock.hub.hf_config import model_config
from penstock.hub.hf_directory import HFDirectory, read_json
from penstock.hub.hf_vision import our_name, text_config
from penstock.hub.quantization import Tensors
from penstock.hub.safetensors_file import SafetensorsFile, TensorInfo
from penstock.hub.schemes import read_scheme
from penstock.hub.stacked_experts import ExpertPlace, expert_places
from penstock.hub.stored import FloatArray, Part, Stored, StoredTensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PLAIN_SUFFIXES = (
    ".weight",
    ".bias",
    ".sinks",
    f".{CHOICE_BIAS}",
    ".A_log",
    ".dt_bias",
)  # of tensors that a model has, and are no scales or tables


class HFCheckpoint:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._described = HFDirectory(directory)
        config = self._described.read_config()
        self._files = self._named_tensors()
        quantization = config.get("quantization_config")
        self._scheme = read_scheme(quantization) if quantization else None
        self._tensors = Tensors(
            {name: file.tensors[theirs] for name, (file, theirs) in self._files.items()},
            self._stored,
            lambda name: self._files[name][0].integers(self._files[name][1]),
        )
        family = FAMILY_FILES.get(text_config(config).get("model_type", ""))
        experts = family and family.experts
        self._experts = _stacked(self._tensors.infos, experts) if experts and experts.stacked else {}
        names = frozenset(name for name in self._files if name.endswith(PLAIN_SUFFIXES)) | self._experts.keys()
        if self._scheme:
            self._scheme.check(self._tensors.infos)
            names |= self._scheme.weights(self._tensors.names)
        else:
            check_scales(self._tensors.infos, None)
        if "model.embed_tokens.weight" not in names:
            raise ModelCorrupt(f"{directory} holds no model.embed_tokens.weight; it is not a complete language model")
        self._config = model_config(
            config,
            self._described.read_generation(),
            has_head="lm_head.weight" in names,
            quantization=self._scheme.quantization if self._scheme else None,
        )
        self._names = names

    @property
    def path(self) -> Path:
        return self._directory

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer_source(self) -> TokenizerFiles:
        return self._described.tokenizer_source

    def tensor_names(self) -> frozenset[str]:
        return self._names

    def stored(self, name: str) -> Stored:
        if name not in self._names:
            raise ModelCorrupt(f"{self._directory} has no tensor {name}; download the model again")
        if place := self._experts.get(name):
            return place.stored(self._tensors, None, name)
        if self._scheme is None or self._is_plain(name):
            return self._stored(name)
        return self._scheme.stored(name, self._tensors)

    def _is_plain(self, name: str) -> bool:
        return name in self._files and self._tensors.infos[name].code not in ("F8_E4M3", "I8")

    def stored_part(self, name: str, part: Part) -> Stored:
        if place := self._experts.get(name):
            return place.stored(self._tensors, part, name)
        if self._scheme is None or self._is_plain(name):
            return self.stored(name).part(part, name)
        return self._scheme.stored_part(name, self._tensors, part)

    def tensor(self, name: str) -> FloatArray:
        return self.stored(name).widened()

    def kv_scales(self, layer: int) -> tuple[float, float]:
        names = kv_scale_names(layer, self._files.keys())
        return (self._number(names[0]), self._number(names[1])) if names else (1.0, 1.0)

    def _number(self, name: str) -> float:
        values = self._stored(name).widened()
        if values.size != 1:
            raise ModelUnsupported(f"{name} of {self._directory} is {list(values.shape)}, not a single number")
        return float(values.item())

    def _stored(self, name: str) -> StoredTensor:
        file, theirs = self._files[name]
        return file.stored(theirs)

    def _named_tensors(self) -> dict[str, tuple[SafetensorsFile, str]]:
        """Every tensor's file, and its name there."""
        named = ((our_name(name), name, file) for name, file in self._open_weights().items())
        return {ours: (file, theirs) for ours, theirs, file in named if ours is not None}

    def _open_weights(self) -> dict[str, SafetensorsFile]:
        """Every tensor's file. Each shard is checked to be complete, and to hold what the index says."""
        if (self._directory / WEIGHTS).is_file():
            single = SafetensorsFile(self._directory / WEIGHTS)
            return dict.fromkeys(single.tensors, single)
        if not (self._directory / INDEX).is_file():
            raise ModelMissing(f"{self._directory} has neither {WEIGHTS} nor {INDEX}; only safetensors can be read")
        places = read_json(self._directory / INDEX).get("weight_map", {})
        shards = {shard: SafetensorsFile(self._directory / shard) for shard in sorted(set(places.values()))}
        for name, shard in places.items():
            if name not in shards[shard].tensors:
                raise ModelCorrupt(f"{shard} does not hold {name}, which {INDEX} says it does; download it again")
        return {name: shards[shard] for name, shard in places.items()}


def _stacked(infos: Mapping[str, TensorInfo], names: ExpertNames) -> dict[str, ExpertPlace]:
    return granite_places(infos, names) if names.stacked == "granite" else expert_places(infos, names)
