"""Any checkpoint as a Hugging Face directory, for the servers that read nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import ModelUnsupported
from penstock.core.files import write_file
from penstock.core.model_config import ModelConfig, RopeScaling
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.families import FAMILY_FILES
from penstock.hub.progress import Progress, silent
from penstock.hub.safetensors_file import DType, write_safetensors
from penstock.hub.stored import FloatArray

LLAMA3_FACTORS = (8.0, 32.0, 2.0, 4.0, 16.0)  # 8: Llama 3.1 and 3.3; 32: Llama 3.2
LLAMA3_ORIGINAL_CONTEXTS = (8192, 4096, 2048)


def convert_to_hf(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    tokenizer_json: str,
    special_tokens: Mapping[str, str],  # "bos_token", "eos_token", "unk_token", "pad_token": those there are
    dtype: DType = "float32",
    progress: Progress = silent,
) -> None:
    """config.json is written last: a directory that has one is complete. Progress counts tensors."""
    config = checkpoint.config
    config_json = hf_config(config, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(checkpoint.tensor_names() - ({"lm_head.weight"} if config.tied_embeddings else set()))

    def tensors() -> Iterator[tuple[str, FloatArray]]:
        for number, name in enumerate(names):
            progress("writing weights", number, len(names))
            yield name, checkpoint.tensor(name)
        progress("writing weights", len(names), len(names))

    write_safetensors(directory / "model.safetensors", tensors(), len(names), dtype)
    write_tokenizer(checkpoint, directory, tokenizer_json, special_tokens)
    _write_json(directory / "config.json", config_json)


def write_tokenizer(
    checkpoint: Checkpoint, directory: Path, tokenizer_json: str, special_tokens: Mapping[str, str]
) -> None:
    """All but the weights and config.json."""
    config = checkpoint.config
    write_file(directory / "tokenizer.json", tokenizer_json)
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }
    if template := checkpoint.tokenizer_source.chat_template:
        tokenizer_config["chat_template"] = template
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _write_json(directory / "generation_config.json", _special_ids(config))


def hf_config(config: ModelConfig, dtype: DType) -> dict[str, Any]:
    """Raises ModelUnsupported where a family's files have a layout that is only read.

    The config has the older form (`rope_theta`, `rope_scaling`, `torch_dtype`), which newer readers also understand."""
    names, files = FAMILY_FILES[config.architecture].experts, FAMILY_FILES[config.architecture]
    if config.linear is not None:
        raise ModelUnsupported(
            f"a {config.architecture} cannot be written: its layers of linear attention are only read"
        )
    if names is not None and names.stacked is not None:
        raise ModelUnsupported(f"a {config.architecture} cannot be written: its experts lie in one tensor")
    if files.only_read:
        raise ModelUnsupported(f"a {config.architecture} cannot be written: its files are only read")
    if config.latent is not None:
        raise ModelUnsupported(f"a {config.architecture} cannot be written: its latent attention is only read")
    return {
        "architectures": [FAMILY_FILES[config.architecture].hf_class],
        "model_type": config.architecture,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        **_activation(config),
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_bias,
        **_sliding_window(config),
        **_attention_scores(config),
        **_rotated_part(config),
        **_granite_scales(config),
        **_unrotated_layers(config),
        **_experts(config),
        "pad_token_id": None,  # Phi's default may lie beyond the vocabulary
        **_special_ids(config),
    }


def _activation(config: ModelConfig) -> dict[str, Any]:
    if config.activation == "silu":
        return {"hidden_act": "silu"}
    return dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")


def _attention_scores(config: ModelConfig) -> dict[str, Any]:
    """Keys of config.json for the families' own attention."""
    local, scale = config.local_rope_theta, config.query_scale
    return {
        **({} if local is None else {"rope_local_base_freq": local}),
        **({} if scale is None or config.activation == "silu" else {"query_pre_attn_scalar": round(scale**-2)}),
        **({} if config.activation == "silu" else _caps(config)),
    }


def _caps(config: ModelConfig) -> dict[str, Any]:
    return {"attn_logit_softcapping": config.attention_cap, "final_logit_softcapping": config.logit_cap}


def _rotated_part(config: ModelConfig) -> dict[str, Any]:
    if not FAMILY_FILES[config.architecture].rotates_a_part:
        return {}
    scaling = config.rope_scaling
    return {
        "partial_rotary_factor": (config.rotary_dim or config.head_dim) / config.head_dim,
        "original_max_position_embeddings": scaling.original_context if scaling else config.context_length,
    }


def _unrotated_layers(config: ModelConfig) -> dict[str, Any]:
    if config.architecture != "smollm3":
        return {}
    return {"no_rope_layers": [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)]}


def _granite_scales(config: ModelConfig) -> dict[str, Any]:
    if config.architecture != "granite":
        return {}
    return {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.query_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }


def _experts(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    count = "num_local_experts" if config.architecture == "mixtral" else "num_experts"
    shared = experts.shared_intermediate_size
    return {
        count: experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalized,
        "mlp_only_layers": list(experts.dense_layers),
        **({"shared_expert_intermediate_size": shared} if shared else {}),
    }


def _special_ids(config: ModelConfig) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    return {"bos_token_id": config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}


def _sliding_window(config: ModelConfig) -> dict[str, Any]:
    windows = set(config.windows) - {None}
    if len(windows) > 1:
        raise ModelUnsupported("its layers have windows of different lengths, which config.json cannot say")
    window = windows.pop() if windows else None
    rule = FAMILY_FILES[config.architecture].windows
    if rule == "on all layers":
        return {"sliding_window": window}
    if rule in ("never", "refused") or window is None:
        return {}
    types = ["full_attention" if width is None else "sliding_attention" for width in config.windows]
    if rule == "in a pattern":
        return {"sliding_window": window, "layer_types": types}
    first = types.index("sliding_attention")
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first, "layer_types": types}


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context,
            "attention_factor": scaling.magnitude,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    if scaling.kind == "longrope":
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.factors),
            "long_factor": list(scaling.long_factors),
            "attention_factor": scaling.magnitude,
        }
    llama3 = scaling if scaling.kind == "llama3" else _recover_llama3(config, scaling.factors)
    return {
        "rope_type": "llama3",
        "factor": llama3.factor,
        "low_freq_factor": llama3.low_freq_factor,
        "high_freq_factor": llama3.high_freq_factor,
        "original_max_position_embeddings": llama3.original_context,
    }


def _recover_llama3(config: ModelConfig, factors: tuple[float, ...]) -> RopeScaling:
    """The parameters that a GGUF's table of factors was made from. Few were ever used, so they are tried."""
    for factor, original_context in product(LLAMA3_FACTORS, LLAMA3_ORIGINAL_CONTEXTS):
        scaling = RopeScaling("llama3", factor=factor, original_context=original_context)
        expected = llama3_factors(scaling, config.rope_theta, config.head_dim)
        if len(expected) == len(factors) and np.allclose(expected, factors, rtol=1e-4):
            return scaling
    raise ModelUnsupported("its rope factors match no known Llama 3 scaling, so config.json cannot say them")


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> tuple[float, ...]:
    """Divisors of each frequency: 1 for short waves, `factor` for long ones, in between a blend."""
    longest_kept = scaling.original_context / scaling.high_freq_factor
    shortest_stretched = scaling.original_context / scaling.low_freq_factor
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < longest_kept:
            factors.append(1.0)
        elif wavelength > shortest_stretched:
            factors.append(scaling.factor)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / span
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return tuple(factors)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
