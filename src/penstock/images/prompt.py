"""Where the tokens of images stand in a prompt: first a placeholder in its text, then ids of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import InvalidRequest
from penstock.core.images import image_tokens
from penstock.images.reading import ReadImage


@dataclass(frozen=True)
class PlacedPrompt:
    ids: list[int]
    starts: list[list[int]]  # of each image, where the tokens of its tiles begin
    num_image_tokens: int = 0


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
    """Ids of a text that is spelled out, with the images' own in place of the placeholders."""
    found: list[int] = []
    starts: list[list[int]] = []
    at = 0
    for image in images:
        begins = []
        for digest, tile in zip(image.digests, image.layout.tiles, strict=True):
            end = ids.index(placeholder_id, at)
            found += ids[at:end]
            begins.append(len(found))
            found += image_tokens(digest, tile.num_tokens)
            at = end + 1
        starts.append(begins)
    found += ids[at:]
    return PlacedPrompt(found, starts, sum(image.layout.num_tokens for image in images))
