"""Source of a model's tokenizer, in the two forms that checkpoints have: `hub` finds it, `text` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
