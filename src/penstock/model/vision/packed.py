"""Images of any size in one run of an encoder: patches of all of them are rows behind each other.

Patches lie in squares that become one token each. Attention is over pieces of neighbouring rows: an image, or a window
of one. Pieces of one size are attended together, whoever's they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.images import ImageInput
from penstock.core.model_config import VisionConfig
from penstock.model.vision import pixels_of

_THETA = 10_000.0

Grid = tuple[int, int]  # rows and columns of patches
Pieces = list[tuple[int, int]]  # where each begins and ends


def packed_pixels(images: Sequence[ImageInput], like: Tensor) -> Tensor:
    """[patches, values] of all images, on the device and in the number format of a weight."""
    return torch.cat([pixels_of(image, like.device, like.dtype) for image in images])


def grids_of(images: Sequence[ImageInput]) -> list[Grid]:
    return [(image.grid[1], image.grid[2]) for image in images]


def whole_images(grids: Sequence[Grid]) -> Pieces:
    """A piece for each image."""
    ends = torch.tensor([rows * columns for rows, columns in grids]).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def in_squares(x: Tensor, merge: int) -> Tensor:
    """[rows, columns, ...] of an image -> [patches, ...] in the order in which they lie."""
    rows, columns = x.shape[:2]
    squares = x.view(rows // merge, merge, columns // merge, merge, *x.shape[2:])
    return squares.transpose(1, 2).flatten(0, 3)


def grid_angles(config: VisionConfig, grids: Sequence[Grid]) -> Tensor:
    """[patches, head size / 2]: a half turns with the row, the other one with the column."""
    part = config.hidden_size // config.num_heads // 2
    frequencies = 1.0 / (_THETA ** (torch.arange(0, part, 2, dtype=torch.float32) / part))
    found = []
    for rows, columns in grids:
        places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        lying = [in_squares(each, config.merge_size).float() for each in places]
        found.append(torch.cat([torch.outer(each, frequencies) for each in lying], dim=1))
    return torch.cat(found)


def attended(qkv: Tensor, angles: tuple[Tensor, Tensor], num_heads: int, pieces: Pieces) -> Tensor:
    """qkv [patches, 3 * hidden], rotated by cosine and sine; each piece attends to all of itself."""
    q, k, v = qkv.view(len(qkv), 3, num_heads, -1).permute(1, 2, 0, 3)  # [heads, patches, dim] each
    q, k = _rotated(q, *angles), _rotated(k, *angles)
    sizes: dict[int, list[int]] = {}
    for begin, end in pieces:
        sizes.setdefault(end - begin, []).append(begin)
    out = torch.empty_like(q)
    for size, begins in sizes.items():
        rows = torch.tensor(begins, device=q.device)[:, None] + torch.arange(size, device=q.device)
        own_q, own_k, own_v = (each[:, rows].transpose(0, 1) for each in (q, k, v))  # [pieces, heads, size, dim]
        out[:, rows] = F.scaled_dot_product_attention(own_q, own_k, own_v).transpose(0, 1)
    return out.transpose(0, 1).flatten(1)


def split_tokens(made: Tensor, images: Sequence[ImageInput]) -> list[Tensor]:
    return list(torch.split(made, [image.num_tokens for image in images]))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
