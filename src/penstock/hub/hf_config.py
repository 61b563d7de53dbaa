"""A Hugging Face config.json as a ModelConfig, by the rules and the defaults of transformers, old form and new.

A field that would change the numbers and is not understood is refused: a model must never be silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import ClampedSwiGLU, Experts, LinearAttention, ModelConfig, check_sizes
from penstock.hub.families import FAMILY_FILES, FamilyFiles
from penstock.hub.family_config import OWN_EXPERTS, family_fields, window_pattern
from penstock.hub.hf_latent import grouped_experts, latent_attention, query_scale
from penstock.hub.hf_rope import local_rope_theta, rope_scaling, rope_theta, rotated_part
from penstock.hub.hf_vision import has_interleaved_sections, rope_sections, text_config, vision_config
from penstock.hub.quantization import Quantization

Json = Mapping[str, Any]

ACTIVATIONS = {"silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh",)}


def model_config(
    config: Json, generation: Json, *, has_head: bool, quantization: Quantization | None = None
) -> ModelConfig:
    """`generation` is generation_config.json, or empty; `has_head` and `quantization` say what the weights are like."""
    whole, config = config, text_config(config)
    family = config.get("model_type")
    if family not in FAMILY_FILES:
        raise ModelUnsupported(f"model_type {family!r} cannot be served; supported: {', '.join(FAMILY_FILES)}")
    files = FAMILY_FILES[family]
    values = {**files.hf_defaults, **config}
    _reject_unknown_math(values, files)
    try:
        return check_sizes(
            replace(
                _with_latents(_build(family, values, generation, has_head), values, files),
                **family_fields(family, values),
                quantization=quantization,
                vision=vision_config(whole),
                rope_sections=rope_sections(whole),
                rope_interleaved=has_interleaved_sections(whole),
            )
        )
    except KeyError as error:
        raise ModelCorrupt(f"config.json has no {error}; download it again") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelCorrupt(f"config.json holds a value that cannot be ({error}); download it again") from None


def _build(family: str, values: Json, generation: Json, has_head: bool) -> ModelConfig:
    files, num_heads = FAMILY_FILES[family], values["num_attention_heads"]
    biases_everywhere = files.biases == "as configured" and values.get("attention_bias", False)
    head_dim = values.get("head_dim") or values["hidden_size"] // num_heads
    rotary_dim = int(head_dim * rotated_part(values))
    query_size = values.get("query_pre_attn_scalar")
    return ModelConfig(
        architecture=family,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        context_length=values["max_position_embeddings"],
        norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(values),
        rope_scaling=rope_scaling(values, is_phi=family == "phi3"),
        tied_embeddings=values.get("tie_word_embeddings", not has_head),
        attention_bias=_biases_on_qkv(files, values),
        output_bias=biases_everywhere,
        attention_sinks=files.has_sinks,
        windows=_windows(files, values),
        local_rope_theta=local_rope_theta(values),
        rotary_dim=rotary_dim if rotary_dim < head_dim else None,
        query_scale=query_size**-0.5 if query_size else None,
        attention_cap=values.get("attn_logit_softcapping"),
        logit_cap=values.get("final_logit_softcapping"),
        activation=files.activation,
        norm_offset=1.0 if files.norms_from_one else 0.0,
        embedding_scale=values["hidden_size"] ** 0.5 if files.scales_embedding else 1.0,
        output_gate=files.has_linear_attention,
        linear=_linear_attention(values) if files.has_linear_attention else None,
        experts=_experts(family, values)
        if files.experts and not files.has_latents and family not in OWN_EXPERTS
        else None,
        eos_token_ids=_end_tokens(values, generation),
        bos_token_id=values.get("bos_token_id"),
    )


def _with_latents(config: ModelConfig, values: Json, files: FamilyFiles) -> ModelConfig:
    """Heads as they are attended: all of them share one key, of which the value is a part."""
    if not files.has_latents:
        return config
    latent = latent_attention(values)
    return replace(
        config,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.cached_dim,
        query_scale=query_scale(values, latent),
        experts=grouped_experts(config.architecture, values),
    )


def _reject_unknown_math(values: Json, files: FamilyFiles) -> None:
    activation = values.get("hidden_activation") or values.get("hidden_act", "silu")
    if activation not in ACTIVATIONS[files.activation]:
        raise ModelUnsupported(f"its activation is {activation}; supported: {files.activation}")
    if values.get("mlp_bias"):
        raise ModelUnsupported("it has biases in its MLP (mlp_bias), which are not supported")
    if rotated_part(values) != 1.0 and not files.rotates_a_part:
        raise ModelUnsupported(f"it rotates only a part of each head (partial_rotary_factor {rotated_part(values)})")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if values.get(key) and files.activation == "gelu":
            raise ModelUnsupported(f"its {key} is {values[key]}, which is not supported for {files.hf_class}")
    if values.get("qkv_bias", True) is not True:
        raise ModelUnsupported("it has no biases on q, k and v (qkv_bias), which is not supported")


def _biases_on_qkv(files: FamilyFiles, values: Json) -> bool:
    says_so = bool(values.get("attention_bias", False))
    if says_so and files.biases == "refused":
        raise ModelUnsupported(f"its attention has biases (attention_bias), which {files.hf_class} here has not")
    return files.biases == "on qkv" or (says_so and files.biases in ("as configured", "qkv as configured"))


def _experts(family: str, values: Json) -> Experts:
    num_layers, every = values["num_hidden_layers"], values.get("decoder_sparse_step", 1)
    dense = values.get("mlp_only_layers") or ()
    return Experts(
        count=values.get("num_local_experts") or values["num_experts"],
        per_token=values["num_experts_per_tok"],
        intermediate_size=values.get("moe_intermediate_size") or values["intermediate_size"],
        normalized=values.get("norm_topk_prob", False),
        shared_intermediate_size=values.get("shared_expert_intermediate_size", 0),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % every),
        has_biases=family == "gpt_oss",
        activation=_clamped_swiglu(values) if family == "gpt_oss" else "silu",
    )


def _linear_attention(values: Json) -> LinearAttention:
    num_layers, every = values["num_hidden_layers"], values["full_attention_interval"]
    types = values.get("layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
    ]
    unknown = sorted({*types} - {"linear_attention", "full_attention"})
    if unknown:
        raise ModelUnsupported(f"it has layers of {unknown[0]!r}, which is neither linear nor full attention")
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers of {num_layers}")
    return LinearAttention(
        layers=tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention"),
        num_key_heads=values["linear_num_key_heads"],
        num_value_heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        kernel_size=values["linear_conv_kernel_dim"],
    )


def _clamped_swiglu(values: Json) -> ClampedSwiGLU:
    known = ClampedSwiGLU()
    return ClampedSwiGLU(values.get("swiglu_alpha", known.alpha), values.get("swiglu_limit", known.limit))


def _windows(files: FamilyFiles, values: Json) -> tuple[int | None, ...]:
    window: int | None = values.get("sliding_window")
    num_layers: int = values["num_hidden_layers"]
    if files.windows == "refused" and values.get("use_sliding_window"):
        raise ModelUnsupported(f"{files.hf_class} with sliding windows (use_sliding_window) is not supported")
    if files.windows in ("never", "in chunks", "refused") or not window:
        return ()
    if files.windows == "on all layers":
        return (window,) * num_layers if window < values["max_position_embeddings"] else ()
    if files.windows == "in a pattern":
        every = values.get("_sliding_window_pattern") or values["sliding_window_pattern"]
        types = values.get("layer_types") or window_pattern(num_layers, every)
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if not values.get("use_sliding_window", False):
        return ()
    types = values.get("layer_types") or [
        "sliding_attention" if layer >= values["max_window_layers"] else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _end_tokens(config: Json, generation: Json) -> tuple[int, ...]:
    """Chat models often name their end of turn in generation_config.json only."""
    ids: list[int] = []
    for found in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(ids))
