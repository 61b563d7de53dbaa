"""Tiny checkpoints in the integer layouts of public ones, packed column by column as their writers describe it, and the
weights they stand for. Slow and plain: nothing is shared with the readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from tests.hub.families import random_model
from tests.hub.fp8_checkpoints import LLAMA, edit_config, weights_file

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Integers:
    """(value - zero) * scale of one weight; the group of column i is groups[i]."""

    values: np.ndarray  # [out, in]
    zeros: np.ndarray  # [out, groups]
    scales: np.ndarray  # [out, groups] float16
    groups: np.ndarray  # [in]

    def weight(self) -> Tensor:
        shifted = self.values.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return torch.from_numpy(shifted * self.scales[:, self.groups].astype(np.float32))


def integers(out: int, columns: int, bits: int, group: int, *, symmetric: bool, ordered: bool, seed: int) -> Integers:
    dice = np.random.default_rng(seed)
    count = columns // group
    middle = 1 << (bits - 1)
    zeros = np.full((out, count), middle) if symmetric else dice.integers(1, 2 * middle, (out, count))
    groups = np.arange(columns) // group
    # All projections of one input share an order, as in files: it comes from the input's statistics.
    groups = np.random.default_rng(columns).permutation(groups) if ordered else groups
    scales = dice.uniform(0.004, 0.02, (out, count)).astype(np.float16)
    return Integers(dice.integers(0, 2 * middle, (out, columns)), zeros, scales, groups)


def pack(values: np.ndarray, bits: int, places: list[int] | None = None) -> np.ndarray:
    """[rows, columns] -> [rows, columns / per word] int32; of a word's values, the one at places[i] is number i."""
    per_word = 32 // bits
    places = places or list(range(per_word))
    words = np.zeros((values.shape[0], -(-values.shape[1] // per_word)), np.uint32)
    for column in range(values.shape[1]):
        shift = places.index(column % per_word) * bits
        words[:, column // per_word] |= (values[:, column] << shift).astype(np.uint32)
    return words.view(np.int32)


def gptq(one: Integers, bits: int, *, version: int = 1) -> Arrays:
    return {
        "qweight": np.ascontiguousarray(pack(one.values, bits).T),
        "qzeros": pack(one.zeros.T - (1 if version == 1 else 0), bits),
        "scales": np.ascontiguousarray(one.scales.T),
        "g_idx": one.groups.astype(np.int32),
    }


def awq(one: Integers, bits: int) -> Arrays:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": pack(one.values.T, bits, order),
        "qzeros": pack(one.zeros.T, bits, order),
        "scales": np.ascontiguousarray(one.scales.T),
    }


def packed_integers(one: Integers, bits: int) -> Arrays:
    return {
        "weight_packed": pack(one.values, bits),
        "weight_scale": one.scales,
        "weight_zero_point": np.ascontiguousarray(pack(one.zeros.T, bits).T),
        "weight_shape": np.array(one.values.shape, np.int64),
        "weight_g_idx": one.groups.astype(np.int32),
    }


def plain_integers(one: Integers, bits: int) -> Arrays:
    assert bits == 8
    return {
        "weight": (one.values - 128).astype(np.int8),
        "weight_scale": one.scales,
        "weight_zero_point": (one.zeros - 128).astype(np.int8),
    }


def compressed(format: str, bits: int, strategy: str, *, symmetric: bool = True, inputs: Any = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    group = {"weights": weights, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Layout:
    quantization: dict[str, Any]
    write: Callable[[Integers, int], Arrays]
    bits: int = 4
    group: int | None = 32  # None: all columns
    symmetric: bool = False
    ordered: bool = False
    dropped: tuple[str, ...] = ()  # tensors that this writer leaves out
    kept_as: str = "int4"
    more: dict[str, Any] = field(default_factory=dict)


def _gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, **more}


LAYOUTS = {
    "GPTQ": Layout(_gptq(), gptq),
    "GPTQ, symmetric": Layout(_gptq(sym=True), gptq, symmetric=True),
    "GPTQ, act-order": Layout(_gptq(desc_act=True), gptq, ordered=True),
    "GPTQ, one group": Layout(_gptq(group_size=-1), gptq, group=None),
    "GPTQ, 8 bits": Layout(_gptq(bits=8), gptq, bits=8, kept_as="int8"),
    "GPTQ 2": Layout(_gptq(checkpoint_format="gptq_v2"), lambda one, bits: gptq(one, bits, version=2)),
    "AWQ": Layout({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "packed": Layout(
        compressed("pack-quantized", 4, "group"),
        packed_integers,
        symmetric=True,
        dropped=("weight_zero_point", "weight_g_idx"),
    ),
    "packed, asymmetric": Layout(
        compressed("pack-quantized", 4, "group", symmetric=False), packed_integers, dropped=("weight_g_idx",)
    ),
    "packed, act-order": Layout(
        compressed("pack-quantized", 4, "group"),
        packed_integers,
        symmetric=True,
        ordered=True,
        dropped=("weight_zero_point",),
    ),
    "packed, 8 bits": Layout(
        compressed("pack-quantized", 8, "channel"),
        packed_integers,
        bits=8,
        group=None,
        symmetric=True,
        dropped=("weight_zero_point", "weight_g_idx"),
        kept_as="int8",
    ),
    "W8A8": Layout(
        compressed("int-quantized", 8, "channel", inputs=PER_TOKEN),
        plain_integers,
        bits=8,
        group=None,
        symmetric=True,
        dropped=("weight_zero_point",),
        kept_as="w8a8",
    ),
    "W8A16": Layout(
        compressed("int-quantized", 8, "channel", symmetric=False), plain_integers, bits=8, group=None, kept_as="int8"
    ),
}


def write_integers(directory: Path, layout: Layout, config: PreTrainedConfig = LLAMA) -> dict[str, Tensor]:
    """The weights that a reader must find, in float32."""
    random_model(config).to(torch.float16).save_pretrained(directory)
    stored: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(load_file(weights_file(directory)).items()):
        if not name.endswith("_proj.weight"):
            stored[name], expected[name] = weight, weight.float()
            continue
        out, columns = weight.shape
        one = integers(
            out,
            columns,
            layout.bits,
            layout.group or columns,
            symmetric=layout.symmetric,
            ordered=layout.ordered,
            seed=seed,
        )
        for part, array in layout.write(one, layout.bits).items():
            if part not in layout.dropped:
                stored[name.removesuffix("weight") + part] = torch.from_numpy(np.ascontiguousarray(array))
        expected[name] = one.weight()
    save_file(stored, weights_file(directory))
    edit_config(directory, quantization_config=layout.quantization)
    return expected
