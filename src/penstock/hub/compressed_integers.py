"""Integers as compressed-tensors stores them, which llm-compressor writes and vLLM reads.

pack-quantized: `weight_packed` [out, in / 8] packs inputs into words, the integers counted from the lowest;
`weight_zero_point` packs outputs. int-quantized: `weight` is int8. `weight_scale` is [out, groups] in both, and
`weight_g_idx` tells the group of each input where there is an act-order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.hub.quantization import (
    Json,
    Quantization,
    Tensors,
    order_of,
    pack_words,
    require,
    require_some,
    unpack_words,
    unsupported,
)
from penstock.hub.safetensors_file import TensorInfo, Written
from penstock.hub.stored import GroupedTensor, Part, Stored, StoredTensor, integers, packed

FORMATS = ("pack-quantized", "int-quantized")


@dataclass(frozen=True)
class CompressedIntegers:
    bits: Literal[4, 8]
    symmetric: bool
    quantizes_rows: bool  # activations too, each row by what its largest needs
    is_packed: bool

    @classmethod
    def read(cls, config: Json) -> CompressedIntegers:
        require("quantization_config", config, format=FORMATS, transform_config=(None, {}), kv_cache_scheme=(None,))
        require("sparsity_config", config.get("sparsity_config") or {}, format=(None, "dense"))
        found = {cls._of(group, config["format"]) for group in config.get("config_groups", {}).values()}
        if len(found) != 1:
            raise unsupported("config_groups that differ, or none")
        return found.pop()

    @classmethod
    def _of(cls, group: Json, format: str) -> CompressedIntegers:
        require("config_groups", group, format=(None, format), output_activations=(None,))
        weights: Json = group.get("weights") or {}
        require("weights", weights, type=("int",), num_bits=(4, 8), dynamic=(None, False))
        require("weights", weights, strategy=("tensor", "channel", "group"))
        inputs: Json = group.get("input_activations") or {}
        if inputs:
            require("input_activations", inputs, type=("int",), num_bits=(8,), dynamic=(True,), strategy=("token",))
            require("input_activations", inputs, symmetric=(None, True))
            require("weights beside input_activations", weights, num_bits=(8,), strategy=("tensor", "channel"))
            require("weights beside input_activations", weights, symmetric=(None, True))
        if format == "int-quantized":
            require("int-quantized weights", weights, num_bits=(8,))
        symmetric = weights.get("symmetric", True) is not False
        return cls(weights["num_bits"], symmetric, bool(inputs), format == "pack-quantized")

    @property
    def quantization(self) -> Quantization:
        if self.quantizes_rows:
            return "w8a8"
        return "int4" if self.bits == 4 else "int8"

    def weights(self, names: Set[str]) -> frozenset[str]:
        return frozenset(name.removesuffix("_packed") for name in names if name.endswith(".weight_packed"))

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        packed_names = self.weights(infos.keys())
        plain = {name for name, info in infos.items() if info.code == "I8" and name.endswith(".weight")}
        require_some("compressed-tensors", packed_names | plain)
        for name in packed_names | plain:
            if f"{name}_scale" not in infos:
                raise unsupported(f"{name} without {name}_scale")
            if not self.symmetric and f"{name}_zero_point" not in infos:
                raise unsupported(f"{name}, which is not symmetric, without {name}_zero_point")
        for name in packed_names:
            if infos[f"{name}_packed"].shape[1] * 32 // self.bits % infos[f"{name}_scale"].shape[1]:
                raise unsupported(f"{name}_scale of shape {list(infos[f'{name}_scale'].shape)}")

    def stored_part(self, name: str, tensors: Tensors, part: Part) -> Stored:
        return self.stored(name, tensors).part(part, name)  # of views: the rest is not read

    def stored(self, name: str, tensors: Tensors) -> Stored:
        scales = tensors.floats(f"{name}_scale")
        if not self.is_packed:
            return self._from_bytes(name, tensors, scales)
        words = tensors.integers(f"{name}_packed")
        zeros = None
        if not self.symmetric:
            zeros = unpack_words(tensors.integers(f"{name}_zero_point"), self.bits, axis=0)[: words.shape[0]]
        columns = words.shape[1] * 32 // self.bits
        order = None
        if f"{name}_g_idx" in tensors.names:
            index = tensors.integers(f"{name}_g_idx")
            order = order_of(index, columns // scales.values.shape[1], f"{name}_g_idx") if index.min() >= 0 else None
        if order is None:
            values = words.view(np.uint8)
        else:
            integers = unpack_words(words, self.bits, axis=1)[:, order]
            values = packed(integers) if self.bits == 4 else integers
        return GroupedTensor(np.ascontiguousarray(values), self.bits, _two_dimensional(scales), zeros, order=order)

    def _from_bytes(self, name: str, tensors: Tensors, scales: StoredTensor) -> Stored:
        values = tensors.integers(name)
        if self.quantizes_rows:
            by_row = np.broadcast_to(scales.widened().reshape(-1), values.shape[0]).copy()
            return StoredTensor(values, "I8", scales=by_row)
        zeros = None if self.symmetric else _from_lowest(tensors.integers(f"{name}_zero_point"))
        per_row = _two_dimensional(scales)
        if per_row.values.shape[0] == 1:
            per_row = StoredTensor(np.repeat(per_row.values, values.shape[0], axis=0), per_row.format)
        return GroupedTensor(_from_lowest(values), 8, per_row, zeros)


def _from_lowest(values: Any) -> Any:
    """-128 to 127, counted from the lowest: 0 to 255."""
    return values.view(np.uint8) ^ np.uint8(128)


def _two_dimensional(scales: StoredTensor) -> StoredTensor:
    return StoredTensor(scales.values.reshape(scales.values.shape[0] if scales.values.ndim else 1, -1), scales.format)


def compressed_config(format: str, weights: Json, inputs: Json | None, plain: Sequence[str] = ()) -> dict[str, Any]:
    """One group of all linears but the head and those that are plain, as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *plain],
        "kv_cache_scheme": None,
    }


def scheme_entry(kind: str, strategy: str, *, group: int | None = None, dynamic: bool = False) -> dict[str, Any]:
    """Entry of config.json for the scaling of 8-bit numbers, for `weights` or `input_activations`."""
    return {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": dynamic,
    }


def w8a8_tensors(name: str, weight: StoredTensor) -> dict[str, Written]:
    """int-quantized: also FP8's float-quantized, which differs in the number format alone."""
    assert weight.scales is not None
    return {name: Written(weight.values, weight.format), f"{name}_scale": Written(weight.scales[:, None], "F32")}


def packed_tensors(name: str, weight: GroupedTensor) -> dict[str, Written]:
    """pack-quantized, of a weight that is symmetric and lies as it lies."""
    assert weight.zeros is None
    assert weight.order is None
    values = integers(weight)
    return {
        f"{name}_packed": Written(pack_words(values, weight.bits, axis=1), "I32"),
        f"{name}_scale": Written(weight.scales.values, weight.scales.format),
        f"{name}_shape": Written(np.array(values.shape, np.int64), "I64"),
    }
