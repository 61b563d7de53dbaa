"""Idefics3 and SmolVLM: an image is brought to a size, cut into tiles, and follows once more as a whole, made small.

The prompt names the row and the column of each tile in words, which are the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.core.image_processor import ImageProcessorConfig
from penstock.images.processors.layout import Layout, Tile, Values, normalized

if TYPE_CHECKING:
    from PIL import Image

_MAX_SIDE = 4096  # pixels, whatever a model's files say
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3:
    def __init__(self, config: ImageProcessorConfig) -> None:
        self._config = config

    def layout(self, width: int, height: int, *, is_low: bool = False) -> Layout:
        rows, columns = self._cuts(width, height, is_low)
        config = self._config
        patches = config.tile_size // config.patch_size
        tile = Tile(config.tile_tokens, (1, patches, patches), (3, config.tile_size, config.tile_size))
        return Layout(self._text(rows, columns), (tile,) * (rows * columns + 1))

    def values(self, image: Image.Image, *, is_low: bool = False) -> Iterator[Values]:
        config, size = self._config, self._config.tile_size
        rows, columns = self._cuts(*image.size, is_low)
        image = self._resized(image, *self._first_size(*image.size))
        if config.is_split and not is_low:
            image = self._resized(image, *self._whole_tiles(*image.size))
        for row in range(rows):
            for column in range(columns):
                left, top = column * size, row * size
                yield self._values(image.crop((left, top, left + size, top + size)))
        if image.size != (size, size):
            image = self._resized(image, size, size)
        yield self._values(image)

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return image.resize((width, height), resample=self._config.resample)

    def _values(self, tile: Image.Image) -> Values:
        import numpy as np

        return normalized(self._config, np.asarray(tile))

    def _text(self, rows: int, columns: int) -> str:
        one = self._config.placeholder
        lines = [
            "".join(f"{_AROUND}<row_{row}_col_{column}>{one}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + ("\n" if rows else "") + f"{_AROUND}{_WHOLE}{one}{_AROUND}"

    def _cuts(self, width: int, height: int, is_low: bool) -> tuple[int, int]:
        """Rows and columns of tiles, besides the whole; none of an image that is one tile."""
        if is_low or not self._config.is_split:
            return 0, 0
        size = self._config.tile_size
        width, height = self._whole_tiles(*self._first_size(width, height))
        return (height // size, width // size) if max(width, height) > size else (0, 0)

    def _first_size(self, width: int, height: int) -> tuple[int, int]:
        """The longer side is as long as the files say; the other is even, where that is a multiple at all."""
        longest, ratio = self._config.longest_edge, width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            width, height = int(longest * ratio), longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _MAX_SIDE:
            width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
        elif height > width and height > _MAX_SIDE:
            width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
        return max(width, 1), max(height, 1)

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        size, ratio = self._config.tile_size, width / height
        if width >= height:
            width = math.ceil(width / size) * size
            height = math.ceil(int(width / ratio) / size) * size
        else:
            height = math.ceil(height / size) * size
            width = math.ceil(int(height * ratio) / size) * size
        return max(width, size), max(height, size)
