"""A Hugging Face config.json as a ModelConfig, by the rules and the defaults of transformers, old form and new.

What would change the numbers and is not understood is refused: a model must never be silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import ModelConfig, RopeScaling
from penstock.hub.families import FAMILY_FILES
from penstock.hub.quantization import Quantization

Json = Mapping[str, Any]


def model_config(
    config: Json, generation: Json, *, has_head: bool, quantization: Quantization | None = None
) -> ModelConfig:
    """`generation` is generation_config.json, or empty; `has_head` and `quantization` say what the weights are like."""
    family = config.get("model_type")
    if family not in FAMILY_FILES:
        raise ModelUnsupported(f"model_type {family!r} cannot be served; supported: {', '.join(FAMILY_FILES)}")
    values = {**FAMILY_FILES[family].hf_defaults, **config}
    _reject_unknown_math(values)
    try:
        return replace(_build(family, values, generation, has_head), quantization=quantization)
    except KeyError as error:
        raise ModelCorrupt(f"config.json has no {error}; download it again") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ModelCorrupt(f"config.json holds a value that cannot be ({error}); download it again") from None


def _build(family: str, values: Json, generation: Json, has_head: bool) -> ModelConfig:
    num_heads = values["num_attention_heads"]
    biases = FAMILY_FILES[family].biases
    biases_everywhere = biases == "as configured" and values.get("attention_bias", False)
    return ModelConfig(
        architecture=family,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // num_heads,
        context_length=values["max_position_embeddings"],
        norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=_rope_parameters(values).get("rope_theta") or values.get("rope_theta") or 10_000.0,
        rope_scaling=_rope_scaling(_rope_parameters(values)),
        tied_embeddings=values.get("tie_word_embeddings", not has_head),
        attention_bias=biases_everywhere or biases == "on qkv",
        output_bias=biases_everywhere,
        windows=_windows(family, values),
        eos_token_ids=_end_tokens(values, generation),
        bos_token_id=values.get("bos_token_id"),
    )


def _reject_unknown_math(values: Json) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelUnsupported(f"its activation is {values['hidden_act']}; supported: silu")
    if values.get("mlp_bias"):
        raise ModelUnsupported("it has biases in its MLP (mlp_bias), which are not supported")
    rotary = _rope_parameters(values).get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if rotary != 1.0:
        raise ModelUnsupported(f"it rotates only a part of each head (partial_rotary_factor {rotary})")


def _rope_parameters(values: Json) -> Json:
    """transformers 5 has one `rope_parameters`; older files have `rope_scaling` beside `rope_theta`."""
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _rope_scaling(rope: Json) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelUnsupported("its rope parameters differ between layers, which is not supported")
    if kind == "default":
        return None
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
    raise ModelUnsupported(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")


def _windows(family: str, values: Json) -> tuple[int | None, ...]:
    window: int | None = values.get("sliding_window")
    num_layers: int = values["num_hidden_layers"]
    rule = FAMILY_FILES[family].windows
    if rule == "never" or window is None:
        return ()
    if rule == "on all layers":
        return (window,) * num_layers
    if not values.get("use_sliding_window", False):
        return ()
    types: list[str] = values.get("layer_types") or [
        "sliding_attention" if layer >= values["max_window_layers"] else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _end_tokens(config: Json, generation: Json) -> tuple[int, ...]:
    """Chat models often name their end of turn in generation_config.json only."""
    ids: list[int] = []
    for found in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(ids))
