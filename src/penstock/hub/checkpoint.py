"""What a model on disk offers, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.core.model_config import ModelConfig
from penstock.hub.stored import FloatArray, StoredTensor


@dataclass(frozen=True)
class TokenizerFiles:
    """A Hugging Face tokenizer: tokenizer.json and what lies around it."""

    tokenizer_json: Path
    config: dict[str, Any]  # tokenizer_config.json with special_tokens_map.json; may be empty
    chat_template: str | None


@dataclass(frozen=True)
class TokenizerMetadata:
    """A tokenizer described by GGUF metadata: the `tokenizer.*` keys, as plain Python values."""

    metadata: dict[str, Any]
    chat_template: str | None


class Checkpoint(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer_source(self) -> TokenizerFiles | TokenizerMetadata: ...

    def tensor_names(self) -> frozenset[str]:
        """Names as in Hugging Face checkpoints (`model.layers.0.self_attn.q_proj.weight`), in every format."""

    def stored(self, name: str) -> StoredTensor:
        """One tensor in Hugging Face's layout and the file's number format; GGUF's quantized types are dequantized."""

    def tensor(self, name: str) -> FloatArray:
        """The same in float32; C-contiguous, maybe a read-only view."""

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """What keys and values are divided by before they are stored in 8 bits; 1 where the file says nothing."""
