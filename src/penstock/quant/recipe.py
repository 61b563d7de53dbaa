"""Recipe of a quantized model: the method, its numbers, and the layout that others read too.

gptq   4 or 8 bits in groups, fitted to data; AutoGPTQ's and GPTQModel's layout
awq    4 bits in groups with zero points, fitted to data; AutoAWQ's layout (gemm)
int8   8 bits, a scale per output, for activations in 8 bits (W8A8); or in groups, weights alone: compressed-tensors
fp8    E4M3, a scale per output, for activations in FP8: compressed-tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.awq import awq_config, awq_tensors
from penstock.hub.compressed_integers import compressed_config, packed_tensors, scheme_entry, w8a8_tensors
from penstock.hub.families import FAMILY_FILES, routers
from penstock.hub.gptq import gptq_config, gptq_tensors
from penstock.hub.safetensors_file import DType, Written
from penstock.hub.stored import GroupedTensor, StoredTensor
from penstock.model.quantized import Weight
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.grouped import Bits, GroupedWeight
from penstock.model.quantized.int8 import Int8Weight
from penstock.quant import awq, e4m3, gptq, integers
from penstock.quant.grid import Grid
from penstock.quant.layerwise import Fitted, Given

MethodName = Literal["gptq", "awq", "int8", "fp8"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)
GROUP = 128
SMALLEST_GROUP = 16


@dataclass(frozen=True)
class Recipe:
    method: MethodName
    bits: Bits
    group: int | None  # columns with one scale; None: all of a row
    symmetric: bool
    act_order: bool
    dtype: DType  # of what stays

    @property
    def needs_data(self) -> bool:
        return self.method in ("gptq", "awq")

    def nearest(self, weight: Tensor) -> Weight:
        """Each number by itself: all there is to int8 and FP8, and what the others are judged against."""
        if self.method == "fp8":
            return e4m3.quantized(weight)
        if self.group is None:
            return integers.by_row(weight)
        grid = Grid(self.bits, self.symmetric)
        return grid.nearest(weight, grid.widest(weight.view(weight.shape[0], -1, self.group)))

    def fit(self, givens: Sequence[Given], sources: Tensor) -> Fitted:
        """Fits linears that the same channels feed. Those that were given too little get each number by itself."""
        assert self.group is not None
        grid = Grid(self.bits, self.symmetric)
        if self.method == "gptq":
            return Fitted([self._by_gptq(given, grid, self.group) for given in givens])
        known = [(given.weight, given.inputs) for given in givens if given.inputs is not None]
        if not known:
            return Fitted([self.nearest(given.weight) for given in givens])
        scales = awq.best_scales(known, grid, self.group, sources)
        return Fitted([self._by_awq(given, grid, self.group, scales[sources]) for given in givens], scales)

    def _by_gptq(self, given: Given, grid: Grid, group: int) -> Weight:
        if given.inputs is None:
            return self.nearest(given.weight)
        return gptq.quantized(given.weight, given.inputs, grid, group, act_order=self.act_order)

    def _by_awq(self, given: Given, grid: Grid, group: int, by_column: Tensor) -> Weight:
        if given.inputs is None:
            return self.nearest(given.weight * by_column)
        return awq.quantized(given.weight, given.inputs, grid, group, by_column)

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """config.json's `quantization_config`"""
        plain = routers(model)
        if self.method == "gptq":
            assert self.group is not None
            return gptq_config(
                bits=self.bits, group=self.group, symmetric=self.symmetric, act_order=self.act_order, plain=plain
            )
        if self.method == "awq":
            assert self.group is not None
            return awq_config(group=self.group, plain=plain)
        if self.group is not None:
            entry = scheme_entry("int", "group", group=self.group)
            return compressed_config("pack-quantized", entry, None, plain=plain)
        kind, format = ("int", "int-quantized") if self.method == "int8" else ("float", "float-quantized")
        inputs = scheme_entry(kind, "token", dynamic=True)
        return compressed_config(format, scheme_entry(kind, "channel"), inputs, plain=plain)

    def tensors(self, name: str, weight: Weight) -> dict[str, Written]:
        """Tensors that a file has of the weight of this name."""
        stored = _stored(weight)
        if isinstance(stored, StoredTensor):
            return w8a8_tensors(name, stored)
        write = {"gptq": gptq_tensors, "awq": awq_tensors, "int8": packed_tensors}[self.method]
        return write(name, stored)


def make_recipe(
    config: ModelConfig,
    method: MethodName,
    *,
    bits: int | None = None,
    group: int | None = None,
    symmetric: bool | None = None,
    act_order: bool = False,
) -> Recipe:
    """Recipe with a default for all that is not said. A wish is met or refused."""
    _check_family(config)
    _check_attention(config)
    _check_shapes(config)
    allowed = {"gptq": (4, 8), "awq": (4,), "int8": (8,), "fp8": (8,)}[method]
    if bits is not None and bits not in allowed:
        raise ConfigError(f"{method} has {' or '.join(map(str, allowed))} bits, not {bits}", param="bits")
    chosen: Bits = 8 if (bits or allowed[0]) == 8 else 4
    if act_order and method != "gptq":
        raise ConfigError(f"an act-order is GPTQ's; {method} has none", param="act_order")
    if method == "fp8" and group is not None:
        raise ConfigError("FP8 has a scale per output; leave out the group", param="group")
    is_symmetric = method != "awq" if symmetric is None else symmetric
    if method == "awq" and is_symmetric:
        raise ConfigError("AWQ's layout has zero points; leave out --sym", param="symmetric")
    if method in ("int8", "fp8") and not is_symmetric:
        raise ConfigError(f"{method} is symmetric here; leave out --asym", param="symmetric")
    by_row = method == "fp8" or (method == "int8" and group is None)
    # float16 is what the kernels for groups take everywhere; a Gemma's activations grow out of it.
    dtype: DType = "bfloat16" if by_row or FAMILY_FILES[config.architecture].outgrows_float16 else "float16"
    return Recipe(method, chosen, None if by_row else _group(config, group), is_symmetric, act_order, dtype)


def columns(config: ModelConfig) -> tuple[int, ...]:
    """Columns of the linears, by what they multiply: the stream, the heads, and the inside of MLPs and of experts."""
    experts, dense = config.experts, any(not config.has_experts(layer) for layer in range(config.num_layers))
    inside = [] if experts is None else [experts.intermediate_size, experts.shared_intermediate_size]
    inside += [config.intermediate_size] if dense else []
    return tuple(dict.fromkeys((config.hidden_size, config.num_heads * config.head_dim, *filter(None, inside))))


def _group(config: ModelConfig, wanted: int | None) -> int:
    """One size for the whole model: the layouts know no other."""
    counts = columns(config)
    fitting = [size for size in (GROUP, 64, 32, SMALLEST_GROUP) if not any(count % size for count in counts)]
    if wanted is None:
        if not fitting:
            raise ModelUnsupported(
                f"its linears have {counts} columns, which no group of {SMALLEST_GROUP} or more divides"
            )
        return fitting[0]
    if wanted < SMALLEST_GROUP or wanted % 8 or any(count % wanted for count in counts):
        hint = f"; {', '.join(map(str, fitting))} do" if fitting else ""
        raise ConfigError(f"groups of {wanted} do not divide this model's {counts} columns{hint}", param="group")
    return wanted


def _check_family(config: ModelConfig) -> None:
    if config.linear is not None:
        raise ModelUnsupported(
            f"a {config.architecture} has layers of linear attention, which `penstock quantize` cannot write; "
            "`--quant` makes its linears small when the model is loaded"
        )
    names = FAMILY_FILES[config.architecture].experts
    if names is not None and names.stacked is not None:
        raise ModelUnsupported(
            f"a {config.architecture} has its experts in one tensor, which `penstock quantize` cannot write; "
            "`--quant` makes them small when the model is loaded"
        )


def _check_attention(config: ModelConfig) -> None:
    if config.latent is not None:
        raise ModelUnsupported(
            f"a {config.architecture} has latent attention, which `penstock quantize` cannot write; `--quant` makes "
            "its other weights small when the model is loaded"
        )


def _check_shapes(config: ModelConfig) -> None:
    outputs = (*columns(config), config.num_kv_heads * config.head_dim)
    if any(count % 8 for count in outputs):
        raise ModelUnsupported(f"the layouts pack 8 numbers into a word, and its linears have {outputs} outputs")


def _stored(weight: Weight) -> GroupedTensor | StoredTensor:
    def array(tensor: Tensor) -> np.ndarray[Any, Any]:
        return tensor.contiguous().cpu().numpy()

    if isinstance(weight, Int8Weight):
        return StoredTensor(array(weight.values), "I8", scales=array(weight.scales))
    if isinstance(weight, Fp8Weight):
        return StoredTensor(array(weight.values.view(torch.uint8)), "F8_E4M3", scales=array(weight.scales))
    assert isinstance(weight, GroupedWeight)
    return GroupedTensor(
        array(weight.values),
        weight.bits,
        StoredTensor(array(weight.scales), "F16"),
        None if weight.zeros is None else array(weight.zeros),
        order=None if weight.order is None else array(weight.order),
    )
