"""Encoders of images, in plain torch: pixels in, embeddings for a decoder out. Every rank of a model has all of it.

All images of a step are encoded in one run. Numbers on a CPU are float32 whatever the decoder's are, as the native
operations have their activations; on a GPU they are the decoder's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.images import ImageInput
from penstock.core.model_config import VisionConfig
from penstock.hub.stored import FloatArray


class VisionEncoder(Protocol):
    @property
    def config(self) -> VisionConfig: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, images: Sequence[ImageInput]) -> list[Tensor]:
        """[tokens, columns] of each, as the decoder takes them: see `ImageRows`."""


class TensorSource(Protocol):
    """A checkpoint, as far as encoders read it: a random one draws."""

    def tensor(self, name: str) -> FloatArray: ...


@dataclass(frozen=True)
class Reader:
    """Tensors of a checkpoint below one prefix, on the device, in the encoder's number format."""

    checkpoint: TensorSource
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""

    def at(self, path: str) -> Reader:
        return Reader(self.checkpoint, self.device, self.dtype, f"{self.prefix}{path}.")

    def tensor(self, path: str) -> Tensor:
        return torch.from_numpy(self.checkpoint.tensor(self.prefix + path).copy()).to(self.device, self.dtype)

    def affine(self, *paths: str) -> Affine:
        """Several are one, side by side."""
        weights, biases = ([self.tensor(f"{path}.{part}") for path in paths] for part in ("weight", "bias"))
        return Affine(torch.cat(weights), torch.cat(biases))


@dataclass(frozen=True, slots=True)
class Affine:
    weight: Tensor
    bias: Tensor

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps)


def pixels_of(image: ImageInput, device: torch.device, dtype: torch.dtype) -> Tensor:
    values = torch.frombuffer(bytearray(image.values), dtype=torch.float32)
    return values.view(image.shape).to(device, dtype)


Load = Callable[[VisionConfig, Reader], VisionEncoder]
