"""What a model on disk offers, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.model_config import ModelConfig

FloatArray = npt.NDArray[np.float32]


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

    def tensor(self, name: str) -> FloatArray:
        """One tensor, dequantized, in Hugging Face's layout; float32, C-contiguous, maybe a read-only view."""
