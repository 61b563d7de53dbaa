"""A Hugging Face directory of an encoder: a model of the BERT family that makes vectors of texts, and no texts.

The pooling of its tokens' vectors is read from what sentence-transformers writes beside the weights; a directory
without that is pooled by the mean. Anything not understood is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles
from penstock.hub.hf_directory import HFDirectory, read_json
from penstock.hub.safetensors_file import SafetensorsFile
from penstock.hub.stored import FloatArray, StoredTensor

Pooling = Literal["mean", "first", "last"]

FAMILIES = ("bert", "roberta", "xlm-roberta")
WEIGHTS = "model.safetensors"
POOLING_FILE = "1_Pooling/config.json"
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class EncoderShape:
    """Shape of an encoder beyond its ModelConfig."""

    num_types: int  # of token types; all texts are of the first
    first_position: int  # RoBERTa's positions begin after its padding token


class EncoderCheckpoint:
    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._described = HFDirectory(directory)
        self._file = SafetensorsFile(directory / WEIGHTS)
        config = self._described.read_config()
        _refuse_unknown_math(config)
        self._prefix = next((f"{name}." for name in ("bert", "roberta") if self._has(f"{name}.{_WORDS}")), "")
        if not self._has(self._prefix + _WORDS):
            raise ModelCorrupt(f"{directory / WEIGHTS} holds no {_WORDS}; it is no encoder")
        try:
            self.shape = _shape(config)
            self.config = _model_config(config, self.shape, self._most_tokens())
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ModelCorrupt(f"config.json of {directory} is incomplete: {error}") from None

    @cached_property
    def pooling(self) -> Pooling:
        return read_pooling(self.path) or "mean"

    @property
    def tokenizer_source(self) -> TokenizerFiles:
        return self._described.tokenizer_source

    def tensor_names(self) -> frozenset[str]:
        return frozenset(name.removeprefix(self._prefix) for name in self._file.tensors)

    def stored(self, name: str) -> StoredTensor:
        if not self._has(self._prefix + name):
            raise ModelCorrupt(f"{self.path} has no tensor {name}; download the model again")
        return self._file.stored(self._prefix + name)

    def tensor(self, name: str) -> FloatArray:
        return self.stored(name).widened()

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0

    def _has(self, name: str) -> bool:
        return name in self._file.tensors

    def _most_tokens(self) -> int | None:
        """Length of texts in training, in tokens, if that is known."""
        found = read_json(self.path / "sentence_bert_config.json").get("max_seq_length")
        return found if isinstance(found, int) and found > 0 else None


_WORDS = "embeddings.word_embeddings.weight"


def is_encoder(directory: Path) -> bool:
    return read_json(directory / "config.json").get("model_type") in FAMILIES


def read_pooling(directory: Path) -> Pooling | None:
    """None: nobody has written it down."""
    found = read_json(directory / POOLING_FILE)
    modes = [name for name, is_on in found.items() if name.startswith("pooling_mode_") and is_on is True]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise ModelUnsupported(f"{directory / POOLING_FILE} asks for {', '.join(modes)}; one of {', '.join(_POOLINGS)}")
    return _POOLINGS[modes[0]]


def _refuse_unknown_math(config: dict[str, Any]) -> None:
    for name, known in {"hidden_act": "gelu", "position_embedding_type": "absolute"}.items():
        if config.get(name, known) != known:
            raise ModelUnsupported(f"{name} {config[name]!r} cannot be served by an encoder; supported: {known}")
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise ModelUnsupported(f"an encoder with {name} cannot be served")


def _shape(config: dict[str, Any]) -> EncoderShape:
    is_roberta = config["model_type"] != "bert"
    return EncoderShape(config.get("type_vocab_size", 2), int(config["pad_token_id"]) + 1 if is_roberta else 0)


def _model_config(config: dict[str, Any], shape: EncoderShape, most_tokens: int | None) -> ModelConfig:
    positions = config["max_position_embeddings"] - shape.first_position
    heads = config["num_attention_heads"]
    return ModelConfig(
        architecture=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config["hidden_size"] // heads,
        context_length=min(positions, most_tokens or positions),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        tied_embeddings=True,
    )
