"""Rotary embeddings as config.json says them, in its many forms. Anything not understood is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import RopeScaling

Json = Mapping[str, Any]

# Phi-3's first files called it so.
LONGROPE = ("longrope", "su", "yarn")


def rope_parameters(values: Json) -> Json:
    """transformers 5 has one `rope_parameters`; older files have `rope_scaling` beside `rope_theta`. If layers with a
    window have their own (Gemma 3), returns those of the others."""
    found: Json = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if "rope_local_base_freq" in values and "full_attention" in found:
        found = found["full_attention"] or {}
    return found


def rope_theta(values: Json) -> float:
    theta: float = rope_parameters(values).get("rope_theta") or values.get("rope_theta") or 10_000.0
    return theta


def local_rope_theta(values: Json) -> float | None:
    """Rope theta of layers with a window, in families that have another there; else None."""
    if "rope_local_base_freq" not in values:
        return None
    local: Json = (values.get("rope_parameters") or {}).get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ModelUnsupported(f"rope scaling {local['rope_type']!r} of layers with a window is not supported")
    theta: float = local.get("rope_theta") or values["rope_local_base_freq"]
    return theta


def rotated_part(values: Json) -> float:
    part: float = rope_parameters(values).get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    return part


def rope_scaling(values: Json, *, is_phi: bool) -> RopeScaling | None:
    rope = rope_parameters(values)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelUnsupported("its rope parameters differ between layers, which is not supported")
    if kind == "default":
        return None
    if is_phi and kind in LONGROPE:
        return _longrope(rope, values)
    if kind == "yarn":
        return _yarn(rope, values)
    if kind == "linear":
        return RopeScaling("linear", factor=rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_context=rope["original_max_position_embeddings"],
        )
    raise ModelUnsupported(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _longrope(rope: Json, values: Json) -> RopeScaling:
    original: int = rope.get("original_max_position_embeddings") or values["original_max_position_embeddings"]
    stretch = rope.get("factor") or values["max_position_embeddings"] / original
    return RopeScaling(
        "longrope",
        original_context=original,
        factors=tuple(map(float, rope["short_factor"])),
        long_factors=tuple(map(float, rope["long_factor"])),
        magnitude=rope.get("attention_factor") or longrope_magnitude(stretch, original),
    )


def _yarn(rope: Json, values: Json) -> RopeScaling:
    original: int = rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
    factor = rope.get("factor") or values["max_position_embeddings"] / original
    scale, scale_of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    magnitude = yarn_magnitude(factor, 1.0)
    if scale and scale_of_all:
        magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, scale_of_all)
    if rope.get("attention_factor") is not None:
        magnitude = rope["attention_factor"]
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context=original,
        magnitude=magnitude,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
    )


def yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(stretch: float, original_context: int) -> float:
    return math.sqrt(1 + math.log(stretch) / math.log(original_context)) if stretch > 1 else 1.0
