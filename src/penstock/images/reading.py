"""An image that was looked at: how many tokens it has and what it is called, before a pixel of it is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

from penstock.core.errors import InvalidImage
from penstock.core.image_processor import ImageProcessorConfig
from penstock.core.images import ImageInput
from penstock.images.decode import Header, decode, read_header
from penstock.images.processors import Layout, processor_of


@dataclass(frozen=True)
class ReadImage:
    data: bytes
    header: Header
    layout: Layout
    digests: tuple[str, ...]  # of its tiles
    is_low: bool


class ImageReader:
    """Reads images for one model. Its methods block: a large image takes long to hash, and longer to decode."""

    def __init__(self, config: ImageProcessorConfig, *, max_pixels: int) -> None:
        self.placeholder = config.placeholder
        self._name = config.digest
        self._processor = processor_of(config)
        self._max_pixels = max_pixels

    def read(self, data: bytes, *, is_low: bool = False) -> ReadImage:
        """Raises InvalidImage."""
        header = read_header(data, self._max_pixels)
        return self._read(data, header, is_low)

    def unseen(self, width: int, height: int, *, is_low: bool = False) -> ReadImage:
        """An image of which nothing is known but a size that it may have."""
        return self._read(b"", Header("", width, height, 1), is_low)

    def _read(self, data: bytes, header: Header, is_low: bool) -> ReadImage:
        layout = self._processor.layout(header.width, header.height, is_low=is_low)
        name = f"{blake2b(data, digest_size=32).hexdigest()} {self._name} {is_low}"
        tiles = range(len(layout.tiles))
        digests = tuple(blake2b(f"{name} {tile}".encode(), digest_size=32).hexdigest() for tile in tiles)
        return ReadImage(data, header, layout, digests, is_low)

    def inputs(self, read: ReadImage) -> list[ImageInput]:
        """The image's tiles for the engine, that begin nowhere yet. Raises InvalidImage. Their values are views: a copy
        would keep the interpreter's lock for as long as it takes."""
        values = self._processor.values(decode(read.data, read.header), is_low=read.is_low)
        return [
            ImageInput(digest, 0, tile.num_tokens, list(tile.grid), list(tile.shape), memoryview(made).cast("B"))  # type: ignore[arg-type]
            for digest, tile, made in zip(read.digests, read.layout.tiles, values, strict=True)
        ]


@contextmanager
def named(path: str) -> Iterator[None]:
    """Errors about an image inside the block name the part of the request at this path."""
    try:
        yield
    except InvalidImage as error:
        raise InvalidImage(f"{path}: {error.message}", param=path, reason=error.reason) from None
