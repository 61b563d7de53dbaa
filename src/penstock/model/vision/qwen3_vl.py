"""Qwen3-VL: images of any size whose patches all see each other, and deepstack: what some of the encoder's layers made
is added to the stream behind the decoder's first layers.

Learned positions are those of a square grid, which is stretched over each image's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.images import ImageInput
from penstock.core.model_config import VisionConfig
from penstock.model.vision import Affine, Reader
from penstock.model.vision.packed import (
    Grid,
    attended,
    grid_angles,
    grids_of,
    in_squares,
    packed_pixels,
    split_tokens,
    whole_images,
)

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Merger:
    """A square of patches becomes one token. The norm is of a patch, or of the whole square."""

    norm: Affine
    up: Affine
    down: Affine

    @classmethod
    def load(cls, reader: Reader) -> Merger:
        return cls(reader.affine("norm"), reader.affine("linear_fc1"), reader.affine("linear_fc2"))

    def __call__(self, x: Tensor) -> Tensor:
        squares = self.norm.norm(x.view(-1, len(self.norm.weight)), _EPS).view(-1, self.up.weight.shape[1])
        return self.down.linear(F.gelu(self.up.linear(squares)))


@dataclass(frozen=True, slots=True)
class FullLayer:
    attention_norm: Affine
    qkv: Affine
    output: Affine
    norm: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class Qwen3Encoder:
    config: VisionConfig
    patches: Affine  # a convolution whose stride is its size
    positions: Tensor  # [1, hidden, side, side] float32
    layers: list[FullLayer]
    merger: Merger
    stacked: dict[int, Merger]  # by the layer whose results it merges

    @classmethod
    def load(cls, config: VisionConfig, reader: Reader) -> Qwen3Encoder:
        vision = reader.at("vision")
        patches = vision.affine("patch_embed.proj")
        positions = vision.tensor("pos_embed.weight").float()
        side = config.position_side
        return cls(
            config,
            Affine(patches.weight.flatten(1), patches.bias),
            positions.view(side, side, -1).permute(2, 0, 1)[None].contiguous(),
            [_layer(vision.at(f"blocks.{index}")) for index in range(config.num_layers)],
            Merger.load(vision.at("merger")),
            {
                layer: Merger.load(vision.at(f"deepstack_merger_list.{place}"))
                for place, layer in enumerate(config.stacked_layers)
            },
        )

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def __call__(self, images: Sequence[ImageInput]) -> list[Tensor]:
        config, grids = self.config, grids_of(images)
        turns = grid_angles(config, grids).to(self.device)
        angles, pieces = (turns.cos(), turns.sin()), whole_images(grids)
        x = self.patches.linear(packed_pixels(images, self.patches.weight))
        x = x + torch.cat([self._positions(grid) for grid in grids]).to(x.dtype)
        stacked = []
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.linear(layer.attention_norm.norm(x, _EPS))
            x = x + layer.output.linear(attended(qkv, angles, config.num_heads, pieces))
            x = x + layer.down.linear(F.gelu(layer.up.linear(layer.norm.norm(x, _EPS)), approximate="tanh"))
            if (merger := self.stacked.get(index)) is not None:
                stacked.append(merger(x))
        return split_tokens(torch.cat([self.merger(x), *stacked], dim=1), images)

    def _positions(self, grid: Grid) -> Tensor:
        stretched = F.interpolate(self.positions, grid, mode="bilinear", align_corners=True)[0]
        return in_squares(stretched.permute(1, 2, 0).contiguous(), self.config.merge_size)


def _layer(reader: Reader) -> FullLayer:
    return FullLayer(
        attention_norm=reader.affine("norm1"),
        qkv=reader.affine("attn.qkv"),
        output=reader.affine("attn.proj"),
        norm=reader.affine("norm2"),
        up=reader.affine("mlp.linear_fc1"),
        down=reader.affine("mlp.linear_fc2"),
    )
