"""FP8 weights in Hugging Face directories, in the layouts of compressed-tensors, FBGEMM and AutoFP8.

All three store a linear's weight as F8_E4M3 beside its `weight_scale`, one number or one per row. They differ in how
config.json says what becomes of the activations: quantized by a scale of the file, or by what each token needs. The
config does not say which layers are quantized: the type of each tensor does. Knows names and shapes, not files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from penstock.core.errors import ModelUnsupported
from penstock.hub.quantization import Json, Quantization, Tensors
from penstock.hub.quantization import require as _require
from penstock.hub.quantization import unsupported as _unsupported
from penstock.hub.safetensors_file import TensorInfo
from penstock.hub.stored import Part, Stored

Activations = Literal["static", "dynamic"]  # quantized by the file's `input_scale`, or each token by its own largest

# Names of the scales of a layer's keys and values, below `self_attn`; they changed over the years.
KV_SCALES = (
    ("k_scale", "v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)


@dataclass(frozen=True)
class Fp8:
    activations: Activations

    @property
    def quantization(self) -> Quantization:
        return "fp8"

    def weights(self, names: Set[str]) -> frozenset[str]:
        return frozenset()  # they have the names of plain ones

    def check(self, infos: Mapping[str, TensorInfo]) -> None:
        check_scales(infos, self.activations)

    def stored_part(self, name: str, tensors: Tensors, part: Part) -> Stored:
        return self.stored(name, tensors).part(part, name)  # of views: the rest is not read

    def stored(self, name: str, tensors: Tensors) -> Stored:
        found = tensors.floats(name)
        scales = tensors.floats(f"{name}_scale").widened().reshape(-1)  # one, or one per row
        return replace(
            found,
            scales=np.broadcast_to(scales, found.values.shape[0]).copy(),
            input_scale=_number(input_scale_name(name), tensors) if self.activations == "static" else None,
        )


def _number(name: str, tensors: Tensors) -> float:
    values = tensors.floats(name).widened()
    if values.size != 1:
        raise ModelUnsupported(f"{name} is {list(values.shape)}, not a single number")
    return float(values.item())


def read_activations(quantization: Json) -> Activations:
    """Activations' scheme in config.json's `quantization_config`; anything not understood is refused."""
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(quantization)
    if method == "fbgemm_fp8":
        # `activation_scale_ub` is not applied. It clips a token's activations at the bound, so that a huge one does not
        # cost the smallest their last bits; without it the huge one is kept instead.
        return "dynamic"
    if method == "fp8":
        _require("quantization_config", quantization, weight_block_size=(None,), fmt=(None, "e4m3"))
        _require("quantization_config", quantization, activation_scheme=("static", "dynamic"))
        return "static" if quantization["activation_scheme"] == "static" else "dynamic"
    raise _unsupported(f"quant_method {method!r}")


def check_scales(tensors: Mapping[str, TensorInfo], activations: Activations | None) -> None:
    """Every FP8 weight must have the scales that its layout promises, in the shapes that can be used."""
    for name, info in tensors.items():
        if not info.code.startswith("F8_"):
            continue
        if info.code != "F8_E4M3":
            raise _unsupported(f"{name} is {info.code}")
        if activations is None:
            raise _unsupported(f"{name} is {info.code}, but config.json has no quantization_config")
        _check_scale(f"{name}_scale", tensors, (1, info.shape[0]))
        if activations == "static":
            _check_scale(input_scale_name(name), tensors, (1,))


def input_scale_name(weight: str) -> str:
    return weight.removesuffix("weight") + "input_scale"


def kv_scale_names(layer: int, names: Set[str]) -> tuple[str, str] | None:
    """The scales of this layer's keys and values, if there are any among `names`."""
    for key, value in KV_SCALES:
        pair = f"model.layers.{layer}.self_attn.{key}", f"model.layers.{layer}.self_attn.{value}"
        if names >= set(pair):
            return pair
    return None


def _compressed_tensors(quantization: Json) -> Activations:
    formats = ("float-quantized", "naive-quantized")
    _require("quantization_config", quantization, format=formats, transform_config=(None, {}))
    _require("sparsity_config", quantization.get("sparsity_config") or {}, format=(None, "dense"))
    if cache := quantization.get("kv_cache_scheme"):
        _require_fp8("kv_cache_scheme", cache, strategy=("tensor",), dynamic=(None, False))
    found: set[Activations] = set()
    for group in quantization.get("config_groups", {}).values():
        _require("config_groups", group, format=(None, *formats), output_activations=(None,))
        _require_fp8("weights", group.get("weights") or {}, strategy=("tensor", "channel"), dynamic=(None, False))
        inputs = group.get("input_activations") or {}
        is_dynamic = inputs.get("dynamic") is True
        strategies = ("token", "tensor") if is_dynamic else ("tensor",)
        _require_fp8("input_activations", inputs, strategy=strategies, dynamic=(None, False, True))
        found.add("dynamic" if is_dynamic else "static")
    if len(found) != 1:
        raise _unsupported("config_groups that do not all quantize activations in the same way")
    return found.pop()


def _require_fp8(label: str, entry: Json, **allowed: tuple[Any, ...]) -> None:
    _require(label, entry, num_bits=(8,), type=("float",), symmetric=(None, True), **allowed)


def _check_scale(name: str, tensors: Mapping[str, TensorInfo], sizes: tuple[int, ...]) -> None:
    if name not in tensors:
        hint = f" (but {name}_inv, for blocks)" if f"{name}_inv" in tensors else ""
        raise _unsupported(f"an FP8 weight without {name}{hint}")
    shape = tensors[name].shape
    if math.prod(shape) not in sizes or math.prod(shape[1:]) != 1:
        raise _unsupported(f"{name} of shape {list(shape)}")
