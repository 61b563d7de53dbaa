"""Encoders beside those of transformers: the same weights, the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.images import ImageInput
from penstock.model.ops.reference import ReferenceOps
from penstock.model.vision import VisionEncoder
from penstock.model.vision.loading import load_vision
from tests.model.tiny_vision import VisionCheckpoint, hf_vision_model, made_image, pixels

# Rows and columns of patches, of families that take any: squares, strips, the smallest, and what fills no window.
GRIDS = [(4, 6), (2, 2), (2, 14), (18, 2), (6, 6), (4, 6), (10, 8)]


@dataclass(frozen=True)
class Pair:
    name: str
    theirs: PreTrainedModel
    ours: VisionEncoder

    def images(self) -> list[ImageInput]:
        return [made_image(self.name, seed, *grid) for seed, grid in enumerate(GRIDS)]


@cache
def pair_of(name: str, device: str = "cpu") -> Pair:
    theirs = hf_vision_model(name)
    ours = load_vision(VisionCheckpoint(theirs), ReferenceOps(device))
    assert ours is not None
    return Pair(name, theirs, ours)


@torch.inference_mode()
def encoded_by_theirs(theirs: PreTrainedModel, images: Sequence[ImageInput]) -> list[Tensor]:
    """[tokens, columns] of each, levels side by side."""
    sizes, inputs = [image.num_tokens for image in images], pixels(images)
    if theirs.config.model_type.startswith("qwen"):
        grids = torch.tensor([image.grid for image in images])
        found = theirs.model.get_image_features(torch.cat(inputs), grids)
    else:
        found = theirs.model.get_image_features(torch.stack(inputs)[None])
    levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return list(torch.cat([torch.cat(list(level)) for level in levels], dim=1).split(sizes))
