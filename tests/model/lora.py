"""Random LoRA adapters as PEFT saves them, and what a model is once one is merged into its weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.model_config import ModelConfig
from penstock.hub.peft import PeftAdapter
from penstock.hub.safetensors_file import DType, write_safetensors
from penstock.hub.stored import FloatArray
from penstock.model.random_weights import tensor_shapes

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    path: Path,
    model: ModelConfig,
    *,
    seed: int = 0,
    rank: int = 8,
    targets: Iterable[str] = EVERY_LINEAR,
    dtype: DType = "float32",
    ranks: dict[str, int] | None = None,
    layers: dict[int, ModelConfig] | None = None,
    **config: Any,
) -> Path:
    """`ranks`: of targets that have another; `layers`: of another model's shape. The rest of `config` goes into
    adapter_config.json."""
    dice = np.random.default_rng(seed)
    tensors: dict[str, FloatArray] = {}
    shapes = tensor_shapes(model)
    for layer, other in (layers or {}).items():
        shapes |= {
            name: shape for name, shape in tensor_shapes(other).items() if name.startswith(f"model.layers.{layer}.")
        }
    for name, shape in shapes.items():
        target = name.removesuffix(".weight").rpartition(".")[2]
        if target in set(targets) and name.endswith(".weight"):
            each = (ranks or {}).get(target, rank)
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = _normal(dice, (each, shape[1]), shape[1] ** -0.5)
            tensors[f"{prefix}.lora_B.weight"] = _normal(dice, (shape[0], each), each**-0.5)
    saved = {
        "peft_type": "LORA",
        "base_model_name_or_path": "random",
        "bias": "none",
        "target_modules": list(targets),
        "r": rank,
        "lora_alpha": rank,
        **({"rank_pattern": ranks} if ranks else {}),
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(saved))
    write_safetensors(path / "adapter_model.safetensors", tensors.items(), len(tensors), dtype)
    return path


def _normal(dice: np.random.Generator, shape: tuple[int, int], deviation: float) -> FloatArray:
    return dice.normal(0.0, deviation, shape).astype(np.float32)


def merged(tensors: dict[str, FloatArray], adapter: PeftAdapter) -> dict[str, FloatArray]:
    """The weights of a model that needs no adapter to say the same."""
    found = dict(tensors)
    for name, pair in adapter.layers.items():
        weight = f"{name}.weight"
        delta = pair.b.widened().astype(np.float64) @ pair.a.widened().astype(np.float64)
        found[weight] = (found[weight].astype(np.float64) + pair.scale * delta).astype(np.float32)
    return found
