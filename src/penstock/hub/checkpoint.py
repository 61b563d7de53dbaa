"""Interface of a model on disk, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.hub.stored import FloatArray, Part, Stored


class Checkpoint(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer_source(self) -> TokenizerFiles | TokenizerMetadata: ...

    def tensor_names(self) -> frozenset[str]:
        """Names as in Hugging Face checkpoints (`model.layers.0.self_attn.q_proj.weight`), in every format."""

    def stored(self, name: str) -> Stored:
        """One tensor in Hugging Face's layout and the file's number format."""

    def tensor(self, name: str) -> FloatArray:
        """The same in float32; C-contiguous, maybe a read-only view."""

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Divisors of keys and values before they are stored in 8 bits; 1 where the file says nothing."""


@runtime_checkable
class ReadsParts(Protocol):
    """A checkpoint that unpacks what it stores, and can unpack a part alone."""

    def stored_part(self, name: str, part: Part) -> Stored: ...


def stored_part(checkpoint: Checkpoint, name: str, part: Part) -> Stored:
    """A part of a tensor. Most tensors are views of mapped files, of which what is not wanted is never read."""
    if isinstance(checkpoint, ReadsParts):
        return checkpoint.stored_part(name, part)
    return checkpoint.stored(name).part(part, name)
