"""Positions of images' tokens in a prompt: first a placeholder in its text, then ids of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import InvalidRequest
from penstock.core.images import image_tokens
from penstock.images.reading import ReadImage


@dataclass(frozen=True)
class PlacedTile:
    digest: str
    start: int
    num_tokens: int


@dataclass(frozen=True)
class PlacedPrompt:
    ids: list[int]  # the prompt's tokens, with the placeholder's id for each token of an image, as in transformers
    tiles: list[list[PlacedTile]]  # of each image

    @property
    def num_image_tokens(self) -> int:
        return sum(tile.num_tokens for image in self.tiles for tile in image)

    def keyed_ids(self) -> list[int]:
        """The ids that an engine is given, and blocks of the cache are named by."""
        ids = list(self.ids)
        for image in self.tiles:
            for tile in image:
                ids[tile.start : tile.start + tile.num_tokens] = image_tokens(tile.digest, tile.num_tokens)
        return ids


def spelled_out(text: str, images: Sequence[ReadImage], placeholder: str) -> str:
    """The text of a prompt, with a placeholder for each tile of each image. Raises InvalidRequest where there are not
    as many as images: then the template writes none for some, or a client wrote one itself."""
    parts = text.split(placeholder)
    if len(parts) != len(images) + 1:
        raise InvalidRequest(
            f"the prompt has {len(images)} images and {len(parts) - 1} places for one ({placeholder}): the model's "
            "chat template takes no images where they are, or a text has such a mark in it",
            param="messages",
        )
    pieces = [parts[0]]
    for image, part in zip(images, parts[1:], strict=True):
        pieces += (image.layout.text, part)
    return "".join(pieces)


def num_placed(num_tokens: int, images: Sequence[ReadImage]) -> int:
    """Tokens of a prompt, of which a text has so many that is spelled out: each tile has one there."""
    return num_tokens + sum(image.layout.num_tokens - len(image.layout.tiles) for image in images)


def placed(ids: Sequence[int], images: Sequence[ReadImage], placeholder_id: int) -> PlacedPrompt:
    """The prompt with each image's tiles placed, from the ids of a text that is spelled out. Raises ValueError if it
    has too few placeholders."""
    found: list[int] = []
    tiles: list[list[PlacedTile]] = []
    at = 0
    for image in images:
        own = []
        for digest, tile in zip(image.digests, image.layout.tiles, strict=True):
            end = ids.index(placeholder_id, at)
            found += ids[at:end]
            own.append(PlacedTile(digest, len(found), tile.num_tokens))
            found += [placeholder_id] * tile.num_tokens
            at = end + 1
        tiles.append(own)
    found += ids[at:]
    return PlacedPrompt(found, tiles)
