"""Layout of quantized weights in a Hugging Face directory: config.json's `quantization_config` says which scheme it is.

A scheme names the tensors that a linear's weight is made of, and puts them together. The config does not say which
linears are quantized: the tensors that are there do. A field that is not understood is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ModelUnsupported
from penstock.hub.safetensors_file import TensorInfo
from penstock.hub.stored import Part, Stored, StoredTensor

Json = Mapping[str, Any]
Quantization = Literal["fp8", "int8", "int4", "w8a8", "mxfp4"]

SUPPORTED = (
    "GPTQ and AWQ (gemm) in 4 bits, GPTQ in 8; compressed-tensors in 4 and 8 bits (pack-quantized), 8-bit integers "
    "(int-quantized) and FP8; FP8 (E4M3) with a scale per tensor or per row, as compressed-tensors, fbgemm_fp8 or fp8, "
    "or for each block, as fp8; MXFP4 experts (gpt-oss)"
)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a directory, by name, whichever file they are in."""

    infos: Mapping[str, TensorInfo]
    floats: Callable[[str], StoredTensor]
    integers: Callable[[str], npt.NDArray[Any]]

    @property
    def names(self) -> Set[str]:
        return self.infos.keys()

    def cut(self, parts: Mapping[str, tuple[slice, slice]]) -> Tensors:
        """These tensors alone, of each some rows and columns."""

        def floats(name: str) -> StoredTensor:
            whole = self.floats(name)
            return replace(whole, values=whole.values[parts[name]])

        infos = {name: self.infos[name] for name in parts}
        return Tensors(infos, floats, lambda name: self.integers(name)[parts[name]])


class Scheme(Protocol):
    @property
    def quantization(self) -> Quantization | None:
        """The format of its weights once they are read; None: they are plain then."""

    def weights(self, names: Set[str]) -> frozenset[str]:
        """The weights that are made of other tensors, by the names of plain ones (`….q_proj.weight`)."""

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        """Refuses what cannot be read, before anything is."""

    def stored(self, name: str, tensors: Tensors) -> Stored:
        """One of those weights, or any other tensor that the scheme has quantized in place."""

    def stored_part(self, name: str, tensors: Tensors, part: Part) -> Stored:
        """Some rows and columns of one. Other parts of its tensors are not read, if no word is cut."""


def require_some(method: str, found: Set[str]) -> None:
    """A directory whose config says that it is quantized must hold something that is."""
    if not found:
        raise unsupported(f"quant_method {method!r}, but no weight in its layout")


def require(label: str, entry: Json, **allowed: tuple[Any, ...]) -> None:
    """Each key must have one of the values; None stands for a key that is not there."""
    for key, values in allowed.items():
        if entry.get(key) not in values:
            raise unsupported(f"{label} with {key} {entry.get(key)!r}")


def unsupported(found: str) -> ModelUnsupported:
    return ModelUnsupported(f"its quantization is not supported: {found}. Supported: {SUPPORTED}; or use a GGUF")


def unpack_words(words: npt.NDArray[np.int32], bits: int, axis: int) -> npt.NDArray[np.uint8]:
    """Small integers from 32-bit words, the first in the lowest bits, along an axis."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    spread = np.expand_dims(words.view(np.uint32), axis + 1) >> np.expand_dims(
        shifts, tuple(range(1, words.ndim - axis))
    )
    shape = list(words.shape)
    shape[axis] *= count
    return (spread & np.uint32((1 << bits) - 1)).astype(np.uint8).reshape(shape)


def pack_words(values: npt.NDArray[Any], bits: int, axis: int) -> npt.NDArray[np.int32]:
    """The inverse of `unpack_words`. A last word that is not full has zeros in its upper bits."""
    count = 32 // bits
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    missing = -moved.shape[-1] % count
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, missing)]).reshape(*moved.shape[:-1], -1, count)
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    words = np.bitwise_or.reduce(padded << shifts, axis=-1)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def group_index(order: npt.NDArray[np.int64] | None, columns: int, group: int) -> npt.NDArray[np.int32]:
    """The group of each column of the weight: the inverse of `order_of`."""
    groups = (np.arange(columns) // group).astype(np.int32)
    if order is None:
        return groups
    index = np.empty_like(groups)
    index[order] = groups
    return index


def order_of(group_index: npt.NDArray[Any], group: int, name: str) -> npt.NDArray[np.int64] | None:
    """The columns group by group (GPTQ's act-order); None: they lie so."""
    if np.array_equal(group_index, np.arange(group_index.size) // group):
        return None
    counts = np.bincount(group_index, minlength=group_index.size // group)
    if group_index.min() < 0 or not np.all(counts == group):
        raise unsupported(f"{name} with groups of different sizes")
    return np.argsort(group_index, kind="stable").astype(np.int64)
