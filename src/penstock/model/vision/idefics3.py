"""Idefics3 and SmolVLM: a SigLIP encoder of square images, and pixel shuffle: neighbouring patches become one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.images import ImageInput
from penstock.core.model_config import VisionConfig
from penstock.model.vision import Affine, Reader, pixels_of


@dataclass(frozen=True, slots=True)
class SiglipLayer:
    attention_norm: Affine
    qkv: Affine
    output: Affine
    norm: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class Idefics3Encoder:
    config: VisionConfig
    patches: Affine  # a convolution whose stride is its size: a linear of each patch
    positions: Tensor  # [patches, hidden]
    layers: list[SiglipLayer]
    norm: Affine
    connector: Tensor  # [hidden of the decoder, hidden * merged patches]

    @classmethod
    def load(cls, config: VisionConfig, reader: Reader) -> Idefics3Encoder:
        vision = reader.at("vision")
        embeddings = vision.at("embeddings")
        patches = embeddings.affine("patch_embedding")
        return cls(
            config,
            Affine(patches.weight.flatten(1), patches.bias),
            embeddings.tensor("position_embedding.weight"),
            [_layer(vision.at(f"encoder.layers.{index}")) for index in range(config.num_layers)],
            vision.affine("post_layernorm"),
            reader.tensor("connector.modality_projection.proj.weight"),
        )

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def __call__(self, images: Sequence[ImageInput]) -> list[Tensor]:
        weight = self.patches.weight
        pixels = torch.stack([pixels_of(image, weight.device, weight.dtype) for image in images])
        x = self.patches.linear(self._cut(pixels)) + self.positions
        for layer in self.layers:
            x = x + layer.output.linear(self._attended(layer.qkv.linear(layer.attention_norm.norm(x, self._eps))))
            x = x + layer.down.linear(F.gelu(layer.up.linear(layer.norm.norm(x, self._eps)), approximate="tanh"))
        x = self._shuffled(self.norm.norm(x, self._eps))
        return list(F.linear(x, self.connector))

    @property
    def _eps(self) -> float:
        return self.config.norm_eps

    def _cut(self, pixels: Tensor) -> Tensor:
        """[images, 3, side, side] -> [images, patches, values], row by row."""
        size = self.config.patch_size
        side = pixels.shape[-1] // size
        tiles = pixels[:, :, : side * size, : side * size].unfold(2, size, size).unfold(3, size, size)
        return tiles.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def _attended(self, qkv: Tensor) -> Tensor:
        heads = qkv.view(*qkv.shape[:2], 3, self.config.num_heads, -1)  # [images, patches, 3, heads, dim]
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [images, heads, patches, dim] each
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def _shuffled(self, x: Tensor) -> Tensor:
        """[images, patches, hidden] -> [images, tokens, hidden * merged], squares of patches row by row."""
        side, merge = self.config.image_size // self.config.patch_size, self.config.merge_size
        squares = x.view(len(x), side // merge, merge, side // merge, merge, x.shape[2])
        return squares.transpose(2, 3).flatten(3).flatten(1, 2)


def _layer(reader: Reader) -> SiglipLayer:
    return SiglipLayer(
        attention_norm=reader.affine("layer_norm1"),
        qkv=reader.affine(*(f"self_attn.{part}_proj" for part in "qkv")),
        output=reader.affine("self_attn.out_proj"),
        norm=reader.affine("layer_norm2"),
        up=reader.affine("mlp.fc1"),
        down=reader.affine("mlp.fc2"),
    )
