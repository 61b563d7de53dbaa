"""Qwen2.5-VL: images of any size, most layers of which see a window of neighbouring patches only.

Patches lie in squares that become one token each, and squares in windows: attention of a window, or of an image, is
over neighbouring rows. Windows of one size are attended together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.images import ImageInput
from penstock.core.model_config import VisionConfig
from penstock.model.vision import Affine, Reader, by_shape, pixels_of

_EPS = 1e-6
_THETA = 10_000.0


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
        """Images of one grid together."""
        found: dict[int, Tensor] = {}
        for places in by_shape(images):
            device, dtype = self.patches.device, self.patches.dtype
            values = torch.stack([pixels_of(images[place], device, dtype) for place in places])
            found.update(zip(places, self._encoded(values, *images[places[0]].grid[1:]), strict=True))
        return [found[place] for place in range(len(images))]

    def _encoded(self, values: Tensor, rows: int, columns: int) -> Tensor:
        """[images, patches, values] -> [images, tokens, hidden of the decoder]"""
        config = self.config
        unit = config.merge_size**2
        order, windows = window_order(config, rows, columns)
        order = order.to(values.device)
        cos, sin = (each.to(values.device) for each in self._angles(rows, columns))
        cos, sin = (each.view(-1, unit, each.shape[1])[order].flatten(0, 1) for each in (cos, sin))
        count, hidden = len(values), config.hidden_size
        x = F.linear(values, self.patches).view(count, -1, unit, hidden)[:, order].flatten(1, 2)
        pieces = [(begin * unit, end * unit) for begin, end in windows]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.linear(_rms(x, layer.attention_norm))
            own = [(0, x.shape[1])] if index in config.full_layers else pieces
            x = x + layer.output.linear(self._attended(qkv, cos, sin, own))
            gate, up = layer.gate_up.linear(_rms(x, layer.norm)).chunk(2, dim=-1)
            x = x + layer.down.linear(F.silu(gate) * up)
        merged = _rms(x, self.merger_norm).view(count, -1, unit * hidden)
        made = self.merger_down.linear(F.gelu(self.merger_up.linear(merged)))
        return made[:, order.argsort()]

    def _angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [patches, head size / 2]: a half turns with the row, the other one with the column."""
        config, merge = self.config, self.config.merge_size
        part = config.hidden_size // config.num_heads // 2
        frequencies = 1.0 / (_THETA ** (torch.arange(0, part, 2, dtype=torch.float32) / part))
        places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        squares = (rows // merge, merge, columns // merge, merge)
        lying = [each.reshape(squares).transpose(1, 2).flatten().float() for each in places]
        angles = torch.cat([torch.outer(each, frequencies) for each in lying], dim=1)
        return angles.cos(), angles.sin()

    def _attended(self, qkv: Tensor, cos: Tensor, sin: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
        heads = qkv.view(*qkv.shape[:2], 3, self.config.num_heads, -1)  # [images, patches, 3, heads, dim]
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [images, heads, patches, dim] each
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        sizes: dict[int, list[int]] = {}
        for begin, end in pieces:
            sizes.setdefault(end - begin, []).append(begin)
        out = torch.empty_like(q)
        for size, begins in sizes.items():
            rows = torch.tensor(begins, device=q.device)[:, None] + torch.arange(size, device=q.device)
            # [images, windows, heads, rows, dim]
            own_q, own_k, own_v = (each[:, :, rows].transpose(1, 2) for each in (q, k, v))
            out[:, :, rows] = F.scaled_dot_product_attention(own_q, own_k, own_v).transpose(1, 2)
        return out.transpose(1, 2).flatten(2)


def window_order(config: VisionConfig, rows: int, columns: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Tokens window by window, and where each window begins and ends among them."""
    size = config.window_size // config.merge_size // config.patch_size
    tokens = torch.arange(rows // config.merge_size * (columns // config.merge_size))
    grid = tokens.view(rows // config.merge_size, columns // config.merge_size)
    found = [tile.flatten() for band in torch.split(grid, size) for tile in torch.split(band, size, dim=1)]
    ends = torch.tensor([len(each) for each in found]).cumsum(0).tolist()
    return torch.cat(found), list(zip([0, *ends[:-1]], ends, strict=True))


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _layer(reader: Reader) -> WindowLayer:
    return WindowLayer(
        attention_norm=reader.tensor("norm1.weight"),
        qkv=reader.affine("attn.qkv"),
        output=reader.affine("attn.proj"),
        norm=reader.tensor("norm2.weight"),
        gate_up=reader.affine("mlp.gate_proj", "mlp.up_proj"),
        down=reader.affine("mlp.down_proj"),
    )
