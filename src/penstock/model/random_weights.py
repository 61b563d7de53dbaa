"""A checkpoint that was never trained: the right shapes, reproducible numbers, no file."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np

from penstock.core.errors import ModelMissing
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import FloatArray, TokenizerFiles, TokenizerMetadata

_MOST_DRAWN = 1 << 22


class RandomCheckpoint:
    """Holds every tensor that any family asks for; a tensor depends on the seed and its name alone."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed
        self._shapes = tensor_shapes(config)

    @property
    def path(self) -> Path:
        return Path("random")

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer_source(self) -> TokenizerFiles | TokenizerMetadata:
        raise ModelMissing("a random model has no tokenizer")

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def tensor(self, name: str) -> FloatArray:
        shape = self._shapes[name]
        draw = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        noise = draw.standard_normal(min(math.prod(shape), _MOST_DRAWN), dtype=np.float32)
        noise = np.resize(noise, shape)  # of a large tensor the rest repeats: drawing billions takes minutes
        # A linear keeps the size of what passes through it; a norm stays near one; a bias near zero.
        if len(shape) == 2:
            return noise * np.float32(shape[1] ** -0.5)
        return noise * np.float32(0.1) + np.float32("norm" in name)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_proj.bias": (q_size,),
        "self_attn.k_proj.bias": (kv_size,),
        "self_attn.v_proj.bias": (kv_size,),
        "self_attn.o_proj.bias": (hidden,),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes
