"""Qwen2.5-VL and Qwen3-VL: an image keeps its shape and nearly its size, and is cut into patches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidImage
from penstock.core.image_processor import ImageProcessorConfig
from penstock.images.processors.layout import Layout, Tile, Values, normalized

if TYPE_CHECKING:
    from PIL import Image

_MAX_RATIO = 200  # of the sides
_LOW_PIXELS = 512 * 512  # of an image that few tokens are to be spent on


class QwenVL:
    def __init__(self, config: ImageProcessorConfig) -> None:
        self._config = config

    def layout(self, width: int, height: int, *, is_low: bool = False) -> Layout:
        config = self._config
        width, height = self._size(width, height, is_low)
        rows, columns = height // config.patch_size, width // config.patch_size
        patch = 3 * config.temporal_patch_size * config.patch_size**2
        tile = Tile(rows * columns // config.merge_size**2, (1, rows, columns), (rows * columns, patch))
        return Layout(config.placeholder, (tile,))

    def values(self, image: Image.Image, *, is_low: bool = False) -> Iterator[Values]:
        import numpy as np

        config = self._config
        image = image.resize(self._size(*image.size, is_low), resample=config.resample)
        pixels = normalized(config, np.asarray(image))
        side, merge, frames = config.patch_size, config.merge_size, config.temporal_patch_size
        rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
        # [channel, row, row in it, y, column, column in it, x], such that patches which are merged follow each other
        cut = pixels.reshape(3, rows // merge, merge, side, columns // merge, merge, side)
        cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        repeated = np.broadcast_to(cut, (*cut.shape[:5], frames, side, side))
        yield np.ascontiguousarray(repeated.reshape(rows * columns, -1))

    def _size(self, width: int, height: int, is_low: bool) -> tuple[int, int]:
        """Multiples of what makes a token, such that the pixels lie within the model's bounds."""
        config = self._config
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise InvalidImage(f"is {width}x{height}: no side may be over {_MAX_RATIO} times the other", reason="size")
        unit, most = config.patch_size * config.merge_size, config.max_pixels
        if is_low:
            most = max(config.min_pixels, min(most, _LOW_PIXELS))
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rows * columns > most:
            shrink = math.sqrt(height * width / most)
            rows = max(unit, math.floor(height / shrink / unit) * unit)
            columns = max(unit, math.floor(width / shrink / unit) * unit)
        elif rows * columns < config.min_pixels:
            grow = math.sqrt(config.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return columns, rows
