"""Images in the runner: embeddings that are kept on the device, and what a step takes of them.

The scheduler says which images are encoded and which are forgotten; all ranks do the same in the same order. The table
has room for as many tokens as the scheduler keeps, and is never moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.core.images import ImageInput
from penstock.core.model_config import VisionConfig
from penstock.model.batch import ImageRows
from penstock.model.vision import VisionEncoder
from penstock.runner.sharing import Ints
from penstock.sched.plan import Slice


class ImagePart(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one image in a step."""

    digest: str
    row: int  # of the batch, of the first one
    first: int  # which of the image's tokens that is
    count: int


class StepImages(msgspec.Struct, frozen=True, array_like=True):
    """Image work of a step, in this order: forget, encode, take."""

    drops: list[str] = []
    encodes: list[ImageInput] = []
    parts: list[ImagePart] = []

    def __bool__(self) -> bool:
        return bool(self.drops or self.encodes or self.parts)


def image_parts(slices: Sequence[Slice]) -> list[ImagePart]:
    """Tokens of images in a step, whose rows are those of the slices one behind the other."""
    found, row = [], 0
    for planned in slices:
        end = planned.start + planned.num_tokens
        for image in planned.images:
            first, last = max(image.start, planned.start), min(image.start + image.num_tokens, end)
            if first < last:
                found.append(ImagePart(image.digest, row + first - planned.start, first - image.start, last - first))
        row += planned.num_tokens
    return found


def mrope_positions(planned: Slice, merge_size: int) -> Ints:
    """Time, row and column that each token of a slice is rotated by, [3, tokens]. An image takes up as many places as
    it has rows or columns of tokens, whichever are more; all after it follow these."""
    end = planned.start + planned.num_tokens
    found = np.empty((3, planned.num_tokens), np.int32)
    found[:] = np.arange(planned.start, end)
    shift = 0  # of all tokens after the images so far
    for image in planned.images:
        if image.start >= end:
            break
        rows, columns = image.grid[1] // merge_size, image.grid[2] // merge_size
        first, last = max(image.start, planned.start), min(image.start + image.num_tokens, end)
        if first < last:
            places = np.arange(first - image.start, last - image.start)
            own = found[:, first - planned.start : last - planned.start]
            own[0], own[1], own[2] = 0, places // columns, places % columns
            own += image.start + shift
        after = max(0, image.start + image.num_tokens - planned.start)
        moved = max(rows, columns) - image.num_tokens
        found[:, after:] += moved
        shift += moved
    return found


class ImageTable:
    """Embeddings of images, by digest."""

    def __init__(self, encoder: VisionEncoder, max_tokens: int, columns: int, dtype: torch.dtype) -> None:
        """`columns`: of what the encoder makes of a token, all levels of it."""
        self.max_tokens = max_tokens
        self._encoder = encoder
        self._device = encoder.device
        self._values = torch.zeros(max_tokens, columns, dtype=dtype, device=self._device)
        self._places: dict[str, Ints] = {}  # rows of the table
        self._free: list[int] = list(range(max_tokens))

    @property
    def config(self) -> VisionConfig:
        return self._encoder.config

    def update(self, step: StepImages) -> None:
        self._forget(step.drops)
        if step.encodes:
            self._keep(step.encodes, self._encoder(step.encodes))

    def rows(self, parts: Sequence[ImagePart]) -> ImageRows | None:
        if not parts:
            return None
        rows = np.concatenate([np.arange(part.row, part.row + part.count) for part in parts])
        places = np.concatenate([self._places[part.digest][part.first : part.first + part.count] for part in parts])
        return ImageRows(
            torch.from_numpy(rows).to(self._device), self._values[torch.from_numpy(places).long().to(self._device)]
        )

    def _forget(self, digests: Iterable[str]) -> None:
        for digest in digests:
            if (places := self._places.pop(digest, None)) is not None:  # else its step failed before it was encoded
                self._free += places.tolist()

    def _keep(self, images: Sequence[ImageInput], embeddings: Sequence[Tensor]) -> None:
        self._forget([image.digest for image in images])
        for image, values in zip(images, embeddings, strict=True):
            assert len(values) == image.num_tokens, "the scheduler has checked how many an image has"
            places = np.array([self._free.pop() for _ in range(image.num_tokens)], dtype=np.int32)
            self._places[image.digest] = places
            self._values[torch.from_numpy(places).long().to(self._device)] = values.to(self._values.dtype)
