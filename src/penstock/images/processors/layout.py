"""Layout of an image: the tiles and the text that a processor makes of it, as far as its size determines them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.image_processor import ImageProcessorConfig

if TYPE_CHECKING:
    from PIL import Image

Values = Any  # an array of float32


@dataclass(frozen=True)
class Tile:
    """A part of an image that is encoded by itself: one `core.images.ImageInput`."""

    num_tokens: int
    grid: tuple[int, int, int]  # frames, rows and columns of patches
    shape: tuple[int, ...]  # of its values


@dataclass(frozen=True)
class Layout:
    text: str  # the image's text in the prompt: a placeholder for each tile, and the processor's own words
    tiles: tuple[Tile, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the tiles, without the words around them."""
        return sum(tile.num_tokens for tile in self.tiles)


class Processor(Protocol):
    def layout(self, width: int, height: int, *, is_low: bool = False) -> Layout:
        """`is_low`: a client wants few tokens spent on it. Raises InvalidImage for a size that cannot be taken."""

    def values(self, image: Image.Image, *, is_low: bool = False) -> Iterator[Values]:
        """Values of each tile, C-contiguous."""


def normalized(config: ImageProcessorConfig, pixels: Values) -> Values:
    """Pixels of [height, width, 3] as [3, height, width] of float32. There are 256 values in each colour, so each is
    computed once, in the order and the number formats that the reference computes in."""
    import numpy as np  # a gateway lays images out, and makes nothing of them

    table = np.arange(256, dtype=np.uint8)
    channels = []
    for channel, (mean, std) in enumerate(zip(config.mean, config.std, strict=True)):
        known: Values = table
        if config.rescale is not None:
            known = (known.astype(np.float64) * config.rescale).astype(np.float32)
        known = known.astype(np.float32)
        if config.is_normalized:
            known = (known - np.float32(mean)) / np.float32(std)
        channels.append(known[pixels[..., channel]])
    return np.stack(channels)
