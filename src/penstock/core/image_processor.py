"""Configuration of a model's image preprocessing, as its files have it. Plain data: a replica hands it to gateways, so
that both count the same tokens for an image and give it the same digest.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

Colours = tuple[float, float, float]


class ImageProcessorConfig(msgspec.Struct, frozen=True):
    family: Literal["idefics3", "qwen_vl"]  # tiles of one size, or patches of an image of nearly any
    placeholder: str  # what the chat template writes for an image: a special token
    mean: Colours
    std: Colours
    patch_size: int
    merge_size: int  # patches merged in each direction: its square is the number of patches of a token
    resample: int  # Pillow's number of the filter
    rescale: float | None = 1 / 255  # None: not done
    is_normalized: bool = True

    # idefics3
    tile_size: int = 0  # pixels of a side
    longest_edge: int = 0  # pixels that an image is brought to before it is cut into tiles
    is_split: bool = True  # False: an image is one tile

    # qwen_vl
    min_pixels: int = 0
    max_pixels: int = 0
    temporal_patch_size: int = 1

    @property
    def digest(self) -> str:
        return blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    @property
    def tile_tokens(self) -> int:
        return (self.tile_size // self.patch_size // self.merge_size) ** 2
