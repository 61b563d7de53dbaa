"""Gemma, Phi and mixtures of experts: tiny random models, and GGUF files made of them as llama.cpp's converter does.

What the file's tensors are called is asked of llama.cpp's own tables, in the `gguf` package.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.hub.families import SHAPE, Tensors, interleave, random_model

_SHAPE: dict[str, Any] = SHAPE | {"max_position_embeddings": 256}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
_SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
MORE: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**_SHAPE, **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=32, norm_topk_prob=True),
    "gemma2": Gemma2Config(**_SHAPE, **_GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=6.0),
    "gemma3_text": Gemma3TextConfig(
        **(_SHAPE | {"num_hidden_layers": 7}),
        **_GEMMA,
        rope_parameters={
            "full_attention": _SCALED,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "phi3": Phi3Config(**_SHAPE, **_IDS),
    "glm4": Glm4Config(**_SHAPE, **_IDS, head_dim=32),
    "granite": GraniteConfig(
        **_SHAPE, embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=1.5
    ),
    "olmo2": Olmo2Config(**_SHAPE, **_IDS),
    "olmoe": OlmoeConfig(**_SHAPE, **_IDS, num_experts=4, num_experts_per_tok=2),
    "smollm3": SmolLM3Config(**(_SHAPE | {"num_hidden_layers": 4}), **_IDS, tie_word_embeddings=False),
    "phi4": Phi3Config(**_SHAPE, **_IDS, rope_parameters=_LONG, original_max_position_embeddings=32),
}
_ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
}


def saved(name: str, directory: Path) -> tuple[Path, Tensors]:
    """A directory as transformers writes it, and what is in its file."""
    random_model(MORE[name]).save_pretrained(directory)
    return directory, load_file(directory / "model.safetensors")


def write_gguf(path: Path, config: PreTrainedConfig, tensors: Tensors, quantization: str = "F32") -> Path:
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_rope(writer, config)
    tokens = [f"token{i}" for i in range(config.vocab_size)]
    tokens[5:8] = ["<end_of_turn>", "<|end|>", "<|endoftext|>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in _stacked(tensors).items():
        stem, _, suffix = name.rpartition(".")
        found = names.get_name(stem)
        assert found is not None, f"llama.cpp has no {name}"
        values = _converted(name, values, config)
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else quantization]
        stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(f"{found}.{suffix}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _add_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type not in ("phi3", "glm4"):
        return
    part = rope["partial_rotary_factor"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(part * head_dim))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors((1 + np.log(256 / 32) / np.log(32)) ** 0.5)
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _stacked(tensors: Tensors) -> Tensors:
    """Experts of one layer in one tensor, and all else as it is."""
    found: Tensors = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        else:
            found[name] = values
    for name, parts in experts.items():
        if "block_sparse_moe" in name:  # Mixtral's first names
            name = name.replace("block_sparse_moe", "feed_forward").removeprefix("model.")
        found[name] = np.stack([parts[i] for i in range(len(parts))])
    return found


def _converted(name: str, values: Any, config: PreTrainedConfig) -> Any:
    if config.model_type in ("mixtral", "granite", "smollm3") and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return interleave(values, heads)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values.squeeze() if "shared_expert_gate" in name else values
