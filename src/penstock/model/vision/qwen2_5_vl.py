"""Qwen2.5-VL: images of any size, most layers of which see a window of neighbouring patches only.

Squares of patches are brought into the order of windows first, and their tokens back in the end.
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
    Pieces,
    attended,
    grid_angles,
    grids_of,
    packed_pixels,
    split_tokens,
    whole_images,
)

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class WindowLayer:
    attention_norm: Tensor
    qkv: Affine
    output: Affine
    norm: Tensor
    gate_up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class Qwen25Encoder:
    config: VisionConfig
    patches: Tensor  # [hidden, values]: a convolution whose stride is its size
    layers: list[WindowLayer]
    merger_norm: Tensor
    merger_up: Affine
    merger_down: Affine

    @classmethod
    def load(cls, config: VisionConfig, reader: Reader) -> Qwen25Encoder:
        vision = reader.at("vision")
        return cls(
            config,
            vision.tensor("patch_embed.proj.weight").flatten(1),
            [_layer(vision.at(f"blocks.{index}")) for index in range(config.num_layers)],
            vision.tensor("merger.ln_q.weight"),
            vision.affine("merger.mlp.0"),
            vision.affine("merger.mlp.2"),
        )

    @property
    def device(self) -> torch.device:
        return self.patches.device

    def __call__(self, images: Sequence[ImageInput]) -> list[Tensor]:
        config, grids, device = self.config, grids_of(images), self.device
        unit, hidden = config.merge_size**2, config.hidden_size
        order, windows = window_order(config, grids)
        order = order.to(device)
        turns = grid_angles(config, grids).to(device).view(-1, unit, hidden // config.num_heads // 2)[order]
        angles = turns.flatten(0, 1).cos(), turns.flatten(0, 1).sin()
        x = F.linear(packed_pixels(images, self.patches), self.patches).view(-1, unit, hidden)[order].flatten(0, 1)
        whole = whole_images(grids)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.linear(_rms(x, layer.attention_norm))
            pieces = whole if index in config.full_layers else windows
            x = x + layer.output.linear(attended(qkv, angles, config.num_heads, pieces))
            gate, up = layer.gate_up.linear(_rms(x, layer.norm)).chunk(2, dim=-1)
            x = x + layer.down.linear(F.silu(gate) * up)
        merged = _rms(x, self.merger_norm).view(-1, unit * hidden)
        made = self.merger_down.linear(F.gelu(self.merger_up.linear(merged)))
        return split_tokens(made[order.argsort()], images)


def window_order(config: VisionConfig, grids: Sequence[Grid]) -> tuple[Tensor, Pieces]:
    """Squares of all images window by window, and where the patches of each window begin and end then."""
    size, merge, first = config.window_size // config.merge_size // config.patch_size, config.merge_size, 0
    found: list[Tensor] = []
    for rows, columns in ((rows // merge, columns // merge) for rows, columns in grids):
        places = torch.arange(first, first + rows * columns).view(rows, columns)
        found += [tile.flatten() for band in torch.split(places, size) for tile in torch.split(band, size, dim=1)]
        first += rows * columns
    ends = (torch.tensor([len(each) for each in found]).cumsum(0) * merge**2).tolist()
    return torch.cat(found), list(zip([0, *ends[:-1]], ends, strict=True))


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _layer(reader: Reader) -> WindowLayer:
    return WindowLayer(
        attention_norm=reader.tensor("norm1.weight"),
        qkv=reader.affine("attn.qkv"),
        output=reader.affine("attn.proj"),
        norm=reader.tensor("norm2.weight"),
        gate_up=reader.affine("mlp.gate_proj", "mlp.up_proj"),
        down=reader.affine("mlp.down_proj"),
    )
