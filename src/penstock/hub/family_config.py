"""Keys of config.json that only one family has, as fields of a ModelConfig. Values not understood are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import AttentionTemperature, Experts, Routing
from penstock.hub.hf_latent import grouped_experts
from penstock.hub.hf_rope import rope_parameters, rope_theta

Json = Mapping[str, Any]
Fields = dict[str, Any]


def family_fields(family: str, values: Json) -> Fields:
    """`values`: config.json over the family's defaults. Raises what a broken config raises: KeyError and such."""
    read = _FAMILIES.get(family)
    return read(values) if read is not None else {}


def _llama4(values: Json) -> Fields:
    num_layers: int = values["num_hidden_layers"]
    if values["num_experts_per_tok"] != 1:
        raise ModelUnsupported(
            f"a token has {values['num_experts_per_tok']} experts (num_experts_per_tok); of Llama 4, 1 is supported"
        )
    rotated = _rotated_layers(values, num_layers)
    kinds = values.get("layer_types") or [
        "chunked_attention" if is_rotated else "full_attention" for is_rotated in rotated
    ]
    if unknown := set(kinds) - {"chunked_attention", "full_attention"}:
        raise ModelUnsupported(f"its layer_types name {', '.join(sorted(unknown))}, which is not supported")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types are {len(kinds)} for {num_layers} layers")
    chunk = values["attention_chunk_size"]
    with_experts = values.get("moe_layers")
    if with_experts is None:
        step = values["interleave_moe_layer_step"]
        with_experts = range(step - 1, num_layers, step)
    width = values["intermediate_size"]
    return {
        "intermediate_size": values["intermediate_size_mlp"],
        "windows": tuple(chunk if kind == "chunked_attention" else None for kind in kinds) if chunk else (),
        "in_chunks": True,
        "unrotated_layers": tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated),
        "temperature": AttentionTemperature(values["attn_scale"], values["floor_scale"])
        if values["attn_temperature_tuning"]
        else None,
        "head_norms": bool(values["use_qk_norm"]),
        "experts": Experts(
            count=values["num_local_experts"],
            per_token=1,
            intermediate_size=width,
            shared_intermediate_size=width,
            shared_gate=False,
            dense_layers=tuple(layer for layer in range(num_layers) if layer not in with_experts),
        ),
    }


def window_pattern(num_layers: int, every: int) -> list[str]:
    """Every so-many-th layer sees all, the others a window."""
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]


def _rotated_layers(values: Json, num_layers: int) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer that is rotated, whatever its name says."""
    flags = values.get("no_rope_layers")
    if not flags:
        every = values["no_rope_layer_interval"]
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(flags) < num_layers:
        raise ValueError(f"no_rope_layers are {len(flags)} for {num_layers} layers")
    return [bool(flag) for flag in flags[:num_layers]]


def _glm4_moe(values: Json) -> Fields:
    return {"head_norms": bool(values["use_qk_norm"]), "experts": grouped_experts("glm4_moe", values)}


def _granite(values: Json) -> Fields:
    return {
        "embedding_scale": values["embedding_multiplier"],
        "query_scale": values["attention_multiplier"],
        "residual_scale": values["residual_multiplier"],
        "logit_divisor": values["logits_scaling"],
    }


def _granite_moe(values: Json) -> Fields:
    count = values["num_local_experts"]
    experts = Experts(
        count=count,
        per_token=values["num_experts_per_tok"],
        intermediate_size=values["intermediate_size"],
        shared_intermediate_size=values["shared_intermediate_size"],
        shared_gate=False,
    )
    return {**_granite(values), "experts": experts if count else None}


def _granite_hybrid(values: Json) -> Fields:
    """Fields of Granite 4 models without Mamba layers. The shared expert is their MLP where there are no experts."""
    num_layers, kinds = values["num_hidden_layers"], values.get("layer_types") or values.get("layers_block_type")
    if kinds is None or not {*kinds} <= {"attention", "full_attention"}:
        raise ModelUnsupported("it has Mamba layers (layer_types), which are not supported for granitemoehybrid")
    position = values.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise ModelUnsupported(f"its position_embedding_type is {position}; supported: rope, nope")
    fields = _granite_moe(values)
    if fields["experts"] is None:
        fields["intermediate_size"] = values["shared_intermediate_size"]
    return {**fields, "unrotated_layers": () if position == "rope" else tuple(range(num_layers))}


def _olmo3(values: Json) -> Fields:
    """Fields of OLMo 3: layers with a window rotate like the others, without their scaling, unless files say how."""
    says_so = (values.get("rope_parameters") or {}).get("sliding_attention")
    return {} if says_so else {"local_rope_theta": rope_theta(values)}


def _olmoe(values: Json) -> Fields:
    if values.get("clip_qkv") is not None:
        raise ModelUnsupported(f"its queries, keys and values are clipped (clip_qkv {values['clip_qkv']})")
    return {}


def _ministral3(values: Json) -> Fields:
    rope = rope_parameters(values)
    beta, tokens = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta:
        return {}
    if not tokens:
        raise ValueError("llama_4_scaling_beta without original_max_position_embeddings")
    return {"temperature": AttentionTemperature(beta, tokens, first=0)}


def _smollm3(values: Json) -> Fields:
    rotated = _rotated_layers(values, values["num_hidden_layers"])
    return {"unrotated_layers": tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)}


def _seed_oss(values: Json) -> Fields:
    if values.get("attention_out_bias"):
        raise ModelUnsupported("its attention's output has a bias (attention_out_bias), which is not supported")
    return {}


def _ernie(values: Json) -> Fields:
    if values.get("use_bias"):
        raise ModelUnsupported("its linear layers have biases (use_bias), which is not supported for ernie4_5")
    return {}


def _exaone4(values: Json) -> Fields:
    """Layers that see all are not rotated where others see a window."""
    if not values.get("sliding_window"):
        return {}
    kinds = values.get("layer_types") or window_pattern(values["num_hidden_layers"], values["sliding_window_pattern"])
    return {"unrotated_layers": tuple(layer for layer, kind in enumerate(kinds) if kind != "sliding_attention")}


def _minimax_m2(values: Json) -> Fields:
    known = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
    for key, value in known.items():
        if values[key] != value:
            raise ModelUnsupported(f"its {key} is {values[key]!r}; supported for minimax_m2: {value!r}")
    if set(values.get("attn_type_list") or (1,)) != {1}:
        raise ModelUnsupported("some of its layers have linear attention (attn_type_list), which is not supported")
    if values.get("shared_intermediate_size"):
        raise ModelUnsupported("it has an expert that all tokens pass (shared_intermediate_size), unlike M2")
    rotary_dim, head_dim = values.get("rotary_dim"), values["head_dim"]
    experts = Experts(
        values["num_local_experts"],
        values["num_experts_per_tok"],
        values["intermediate_size"],
        shared_gate=False,
        routing=Routing("sigmoid"),
    )
    return {"experts": experts, **({"rotary_dim": rotary_dim} if rotary_dim and rotary_dim < head_dim else {})}


def _dots1(values: Json) -> Fields:
    # Its files name the method of the choice where others name the function of the scores.
    named = {"scoring_func": "sigmoid"} if values["scoring_func"] == "noaux_tc" else {}
    return {"experts": grouped_experts("dots1", {**values, **named})}


_FAMILIES: dict[str, Callable[[Json], Fields]] = {
    "llama4_text": _llama4,
    "glm4_moe": _glm4_moe,
    "ministral3": _ministral3,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "minimax_m2": _minimax_m2,
    "dots1": _dots1,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitemoeshared": _granite_moe,
    "granitemoehybrid": _granite_hybrid,
}
OWN_EXPERTS = frozenset(
    ("llama4_text", "glm4_moe", "granitemoe", "granitemoeshared", "granitemoehybrid", "minimax_m2", "dots1")
)
