"""Encoders of the BERT family: every token sees the whole of its text, in both directions, and nothing is cached.

Texts of all lengths lie behind each other in one [tokens, hidden]; nothing is padded. Attention is computed for all
texts of one length together; on a GPU, where many small launches cost more than some idle rows, of about one length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.hub.encoder import EncoderCheckpoint
from penstock.model.texts import TextGroup, Texts

_GROUP_STEP = {"cpu": 1, "cuda": 32}  # texts are put together that differ by less


@dataclass(frozen=True, slots=True)
class Affine:
    weight: Tensor
    bias: Tensor

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Affine
    output: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    norm: Affine


@dataclass(frozen=True, slots=True)
class Encoder:
    config: ModelConfig
    words: Tensor
    positions: Tensor  # what is added at each, with that of the first token type
    norm: Affine
    layers: list[EncoderLayer]

    def __call__(self, texts: Texts) -> Tensor:
        """[tokens, hidden], in the order of the texts."""
        config, eps = self.config, self.config.norm_eps
        groups = texts.groups(_GROUP_STEP[texts.token_ids.device.type])
        x = self.norm.norm(self.words[texts.token_ids] + self.positions[texts.positions], eps)
        for layer in self.layers:
            attended = self._attend(layer.qkv.linear(x), groups)
            x = layer.attention_norm.norm(x + layer.output.linear(attended), eps)
            x = layer.norm.norm(x + layer.down.linear(F.gelu(layer.up.linear(x))), eps)
        assert x.shape[1] == config.hidden_size
        return x

    def _attend(self, qkv: Tensor, groups: list[TextGroup]) -> Tensor:
        heads = qkv.view(-1, 3, self.config.num_heads, self.config.head_dim)  # [tokens, 3, heads, dim]
        found = torch.empty_like(heads[:, 0])
        for rows, is_own in groups:
            q, k, v = heads[rows].permute(2, 0, 3, 1, 4)  # [texts, heads, length, dim] each
            mask = None if is_own is None else is_own[:, None, None, :].expand(-1, -1, rows.shape[1], -1)
            # A row that is repeated finds the same each time.
            found[rows] = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        return found.flatten(1)


def load_encoder(
    checkpoint: EncoderCheckpoint,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Encoder:
    def tensor(name: str) -> Tensor:
        return torch.from_numpy(checkpoint.tensor(name).copy()).to(device, dtype)

    def affine(*names: str) -> Affine:
        """Several behind each other are one."""
        weights, biases = ([tensor(f"{name}.{part}") for name in names] for part in ("weight", "bias"))
        return Affine(torch.cat(weights), torch.cat(biases))

    config, shape = checkpoint.config, checkpoint.shape
    places = tensor("embeddings.position_embeddings.weight")[shape.first_position :][: config.context_length]
    if shape.num_types:
        places = places + tensor("embeddings.token_type_embeddings.weight")[0]
    layers = []
    for i in range(config.num_layers):
        at = f"encoder.layer.{i}"
        layers.append(
            EncoderLayer(
                qkv=affine(*(f"{at}.attention.self.{part}" for part in ("query", "key", "value"))),
                output=affine(f"{at}.attention.output.dense"),
                attention_norm=affine(f"{at}.attention.output.LayerNorm"),
                up=affine(f"{at}.intermediate.dense"),
                down=affine(f"{at}.output.dense"),
                norm=affine(f"{at}.output.LayerNorm"),
            )
        )
        progress(len(layers), config.num_layers)
    return Encoder(config, tensor("embeddings.word_embeddings.weight"), places, affine("embeddings.LayerNorm"), layers)
