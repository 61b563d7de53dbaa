"""Tiny FP8 checkpoints on disk, in the layouts of public ones, and the weights they stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from tests.hub.families import SHAPE, random_model

LLAMA = LlamaConfig(**SHAPE, max_position_embeddings=256)
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


PER_ROW = {**FP8, "strategy": "channel", "dynamic": False}
PER_TENSOR = {**FP8, "strategy": "tensor", "dynamic": False}
PER_TOKEN = {**FP8, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Layout:
    quantization: dict[str, Any]
    scale_shape: tuple[int, ...]  # -1: the rows
    scale_dtype: torch.dtype = torch.float32
    is_static: bool = False


LAYOUTS = {
    "compressed-tensors, a scale per row": Layout(compressed_tensors(PER_ROW, PER_TOKEN), (-1, 1), torch.bfloat16),
    "compressed-tensors, static": Layout(
        compressed_tensors(PER_TENSOR, PER_TENSOR, format="naive-quantized"), (1,), torch.bfloat16, is_static=True
    ),
    "fbgemm": Layout(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, (-1, 1)
    ),
    "fp8, static": Layout(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, (), is_static=True
    ),
    "fp8, dynamic": Layout({"quant_method": "fp8", "activation_scheme": "dynamic"}, ()),
}


def write_fp8(directory: Path, layout: Layout, config: PreTrainedConfig = LLAMA, **more: Tensor) -> dict[str, Tensor]:
    """The weights that a reader must find, in float32. `more` are further tensors; "__" in a name stands for "."."""
    random_model(config).to(torch.bfloat16).save_pretrained(directory)
    stored: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for index, (name, weight) in enumerate(load_file(weights_file(directory)).items()):
        if not name.endswith("_proj.weight"):
            stored[name], expected[name] = weight, weight.float()
            continue
        scale = _scale(weight.float(), layout)
        stored[name] = (weight.float() / scale.float()).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale
        expected[name] = stored[name].float() * scale.float()
        if layout.is_static:
            stored[name.replace("weight", "input_scale")] = torch.tensor(0.5 + index).reshape(layout.scale_shape)
    save_file(stored | {name.replace("__", "."): tensor for name, tensor in more.items()}, weights_file(directory))
    edit_config(directory, quantization_config=layout.quantization)
    return expected


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensor(directory: Path, name: str, tensor: Tensor | None) -> None:
    """Put another tensor in its place; None takes it away."""
    tensors = load_file(weights_file(directory))
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), weights_file(directory))


def weights_file(directory: Path) -> Path:
    return directory / "model.safetensors"


def _scale(weight: Tensor, layout: Layout) -> Tensor:
    largest = weight.abs().amax(1, keepdim=True) if layout.scale_shape[:1] == (-1,) else weight.abs().max()
    return (largest / 448).reshape(layout.scale_shape).to(layout.scale_dtype)
