"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors. Knows the files, and no torch.

An adapter adds `scale * B(A(x))` to some of a model's linear layers. Its name is a digest of all that its output
depends on, so that two directories with the same content are one adapter and a changed one is another.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.hf_directory import read_json
from penstock.hub.peft_patterns import LayerPatterns
from penstock.hub.safetensors_file import SafetensorsFile
from penstock.hub.stored import StoredTensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 256

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<linear>.+)\.lora_(?P<part>[AB])\.weight")
# Prefixes of the part that speaks, in a model that also sees images: as in `hub.hf`.
_TEXT = re.compile(r"^(?:model\.)?(?:language|text)_model\.(?:model\.)?(?=layers\.)")
# Keys that would make an adapter more than pairs of matrices, if set, and what to call them.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole layers of its own (modules_to_save)",
    "trainable_token_indices": "tokens of its own (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "lora_bias": "biases of its own (lora_bias)",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "target_parameters": "parameters that are not linear layers (target_parameters)",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}  # what gives some layers their own
# Ways to begin training that change the base model's weights: the saved pairs belong to those, not to the base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LowRank:
    """Low-rank product that is added to one linear layer."""

    a: StoredTensor  # [rank, in]
    b: StoredTensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.values.shape[0])


@dataclass(frozen=True)
class PeftAdapter:
    path: Path
    digest: str
    base: str  # the model that it says it was trained on; may be empty
    layers: dict[str, LowRank]  # by the linear layer's name, as checkpoints have it

    @property
    def rank(self) -> int:
        return max(each.rank for each in self.layers.values())

    @property
    def num_bytes(self) -> int:
        return sum(each.a.values.nbytes + each.b.values.nbytes for each in self.layers.values())


def read_peft(path: Path) -> PeftAdapter:
    """Read and check all of it: takes as long as the disk. Its arrays are views of the mapped file."""
    path = path.expanduser()
    if not path.is_dir():
        raise ModelMissing(f"there is no adapter directory {path}")
    if not (path / CONFIG).is_file():
        raise ModelMissing(f"{path} has no {CONFIG}; give a directory that PEFT's save_pretrained wrote")
    config = read_json(path / CONFIG)
    _check(config, path)
    if not (path / WEIGHTS).is_file():
        raise ModelMissing(f"{path} has no {WEIGHTS}; only safetensors can be read")
    file = SafetensorsFile(path / WEIGHTS)
    layers = _layers(file, config)
    return PeftAdapter(path, _digest(path / WEIGHTS, layers), str(config.get("base_model_name_or_path") or ""), layers)


def _check(config: dict[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelUnsupported(f"{path} is a {kind or 'nameless'} adapter; only LORA adapters can be used")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ModelUnsupported(f"the adapter {path} has {what}, which is not supported")
    if config.get("bias", "none") != "none":
        raise ModelUnsupported(f"the adapter {path} trained biases (bias={config['bias']!r}), which is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise ModelUnsupported(
            f"the adapter {path} began as {start}, which changes the base model's weights; save it again with "
            "path_initial_model_for_weight_conversion to make a plain one"
        )


def _layers(file: SafetensorsFile, config: dict[str, Any]) -> dict[str, LowRank]:
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name in file.tensors:
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ModelUnsupported(f"{file.path} has {name}, which is no part of a pair lora_A, lora_B: {_guess(name)}")
        pairs.setdefault(_TEXT.sub("model.", found["linear"]), {})[found["part"]] = file.stored(name)
    if not pairs:
        raise ModelCorrupt(f"{file.path} holds no tensors; save the adapter again")
    patterns = {key: _patterns(config, key, pairs, file.path) for key in _PATTERNS}
    return {name: _pair(file.path, name, parts, config, patterns) for name, parts in sorted(pairs.items())}


def _pair(
    path: Path,
    name: str,
    parts: dict[str, StoredTensor],
    config: dict[str, Any],
    patterns: dict[str, LayerPatterns],
) -> LowRank:
    if len(parts) != 2:
        raise ModelCorrupt(f"{path}: {name} has lora_{next(iter(parts))} and not the other; save the adapter again")
    a, b = parts["A"].values, parts["B"].values
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise ModelCorrupt(f"{path}: {name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, which do not fit")
    rank, alpha = (_number(patterns[key], config, key, name, path) for key in _PATTERNS)
    if a.shape[0] != rank:
        raise ModelCorrupt(f"{path}: {name} has rank {a.shape[0]}, and {CONFIG} says {rank:g}")
    if rank > MAX_RANK:
        raise ModelUnsupported(f"{path}: {name} has rank {rank:g}; the most is {MAX_RANK}")
    return LowRank(parts["A"], parts["B"], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _number(patterns: LayerPatterns, config: dict[str, Any], key: str, linear: str, path: Path) -> float:
    """A layer's rank or alpha: where a pattern names the layer by its end, that one's."""
    try:
        number = float(patterns.find(linear, config.get(key, 8)))  # PEFT's own default of both
    except (TypeError, ValueError, OverflowError):
        raise ModelCorrupt(f"{path.parent / CONFIG}: {key} of {linear} cannot be read") from None
    if not math.isfinite(number) or (key == "r" and number < 1):
        raise ModelCorrupt(f"{path.parent / CONFIG}: {key} of {linear} is {number:g}")
    return number


def _patterns(config: dict[str, Any], key: str, layers: Collection[str], path: Path) -> LayerPatterns:
    try:
        return LayerPatterns(config.get(_PATTERNS[key]) or {}, layers)
    except (ValueError, AttributeError) as error:
        raise ModelCorrupt(f"{path.parent / CONFIG}: {key} of its layers cannot be read: {error}") from None


def _guess(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "DoRA is not supported"
    if "lora_embedding" in name:
        return "adapted embeddings are not supported"
    return "layers saved whole are not supported"


def _digest(weights: Path, layers: dict[str, LowRank]) -> str:
    state = hashlib.blake2b(digest_size=16, person=b"penstock.lora")
    state.update(json.dumps({name: each.scale for name, each in layers.items()}, sort_keys=True).encode())
    with weights.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()
