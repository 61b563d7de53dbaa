"""The shapes of well-known models, for benches that need no weights."""

from __future__ import annotations

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig


def _llama(
    hidden: int, ffn: int, layers: int, heads: int, head_dim: int, *, vocab: int = 128_256, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_layers=layers,
        num_heads=heads, num_kv_heads=8, head_dim=head_dim, context_length=8192, rope_theta=500_000.0,
        tied_embeddings=tied,
    )  # fmt: skip


SHAPES = {
    "tiny": _llama(64, 128, 2, 8, 16, vocab=512),  # to see that everything runs
    "llama1b": _llama(2048, 8192, 16, 32, 64, tied=True),
    "llama8b": _llama(4096, 14_336, 32, 32, 128),
    "llama70b": _llama(8192, 28_672, 80, 64, 128),
}


def shape(name: str) -> ModelConfig:
    if name not in SHAPES:
        raise ConfigError(f"no shape {name!r}; there are {', '.join(SHAPES)}", param="shape")
    return SHAPES[name]
