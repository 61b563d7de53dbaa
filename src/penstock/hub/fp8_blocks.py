"""FP8 weights with a scale for each block of rows and columns, as DeepSeek-V3 and R1 are published (`weight_scale_inv`,
blocks of 128 by 128): a weight is F8_E4M3, and what each of its blocks is multiplied with lies beside it.

They are dequantized as they are read, to bfloat16, which has four bits more than E4M3. Knows names and shapes, not
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import ModelUnsupported
from penstock.hub.quantization import Json, Tensors, require, require_some, unsupported
from penstock.hub.safetensors_file import TensorInfo
from penstock.hub.stored import Part, StoredTensor, e4m3_values, narrow_bfloat16

SCALES = "_scale_inv"  # behind a weight's name; what it is multiplied with all the same


@dataclass(frozen=True)
class Fp8Blocks:
    rows: int  # rows and columns of a block
    columns: int

    @classmethod
    def read(cls, config: Json) -> Fp8Blocks:
        # Activations are quantized by token and block where products are of FP8; here products are of bfloat16.
        require("quantization_config", config, fmt=(None, "e4m3"), activation_scheme=("dynamic",))
        size = config["weight_block_size"]
        if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise unsupported(f"quantization_config with weight_block_size {size!r}")
        return cls(*size)

    @property
    def quantization(self) -> None:
        """They are plain once they are read."""

    def weights(self, names: Set[str]) -> frozenset[str]:
        return frozenset()  # they have the names of plain ones

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        found = {name for name, info in infos.items() if info.code.startswith("F8_")}
        require_some("fp8", found)
        for name in found:
            if infos[name].code != "F8_E4M3":
                raise unsupported(f"{name} is {infos[name].code}")
            if f"{name}{SCALES}" not in infos:
                raise unsupported(f"an FP8 weight without {name}{SCALES}")
            shape, scales = infos[name].shape, infos[f"{name}{SCALES}"].shape
            if len(shape) != 2 or scales != self._blocks(shape):
                raise unsupported(f"{name}{SCALES} of shape {list(scales)}, for a weight of {list(shape)}")

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def stored(self, name: str, tensors: Tensors) -> StoredTensor:
        shape = tensors.infos[name].shape
        return self._read(name, tensors, range(shape[0]), range(shape[1]))

    def stored_part(self, name: str, tensors: Tensors, part: Part) -> StoredTensor:
        part.check(tensors.infos[name].shape, name)
        return self._read(name, tensors, range(*part.rows.indices(part.shape[0])), range(*part.column_range))

    def _read(self, name: str, tensors: Tensors, rows: range, columns: range) -> StoredTensor:
        """Some rows and columns: of a mapped file, no other rows are read."""
        values = tensors.floats(name).values[rows.start : rows.stop, columns.start : columns.stop]
        scales = tensors.floats(f"{name}{SCALES}").widened()
        if not np.isfinite(scales).all():
            raise ModelUnsupported(f"{name}{SCALES} holds numbers that are none")
        of_rows = scales[np.arange(rows.start, rows.stop) // self.rows]
        wide = e4m3_values()[values]
        wide *= of_rows[:, np.arange(columns.start, columns.stop) // self.columns]
        return StoredTensor(narrow_bfloat16(wide), "BF16")
