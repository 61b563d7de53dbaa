"""How the files of each family look: what the formats call it, and what they leave unsaid. A family is one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.core.model_config import ModelConfig


@dataclass(frozen=True)
class ExpertNames:
    """What Hugging Face calls a mixture's parts, below a layer."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    # How gate and up lie in the files of families whose experts are one tensor; None: each has tensors of its own.
    # "interleaved": [experts, in, out], and they take turns; "halves": [experts, out, in], gate first.
    stacked: Literal["interleaved", "halves"] | None = None


@dataclass(frozen=True)
class FamilyFiles:
    hf_class: str  # what config.json calls the model's class
    hf_defaults: Mapping[str, Any]  # what transformers takes for a key that config.json does not have
    # Biases of the attention: on all four projections if the config says so; on q, k and v without its saying so.
    biases: Literal["as configured", "on qkv", "never"]
    # Sliding windows: on every layer that has a window configured, or on the layers that the config lists. "in a
    # pattern": on all but every n-th. "refused": no checkpoint has them, and how they would be meant is not known.
    windows: Literal["never", "on all layers", "on some layers", "in a pattern", "refused"]
    # None: in GGUF it is a llama, and what else it has says what it is; or its GGUF files are not read.
    gguf_name: str | None
    gguf_rotates_neighbours: bool = False  # llama.cpp's rotation of q and k; the others' files are as Hugging Face's
    gguf_parts: Mapping[str, str] = field(default_factory=dict)  # of a block, where they are not named as usual
    gguf_end_tokens: tuple[str, ...] = ()  # that end a turn, where the file does not say so
    activation: Literal["silu", "gelu"] = "silu"
    norms_from_one: bool = False  # the norms' weights are stored less one; in GGUF they are whole
    scales_embedding: bool = False  # by the root of the hidden size
    rotates_a_part: bool = False  # a config may have only a part of each head rotated
    outgrows_float16: bool = False  # its activations do
    has_sinks: bool = False  # its attention has
    has_linear_attention: bool = False  # most of its layers have, and the others' attention has a gate
    experts: ExpertNames | None = None


_SLIDING = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
# The decoder of Qwen3-Next and of what came of it: three layers of linear attention, then one of full attention.
_QWEN_HYBRID: dict[str, Any] = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_EXPERTS: dict[str, Any] = {
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_GEMMA_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

FAMILY_FILES: dict[str, FamilyFiles] = {
    "llama": FamilyFiles(
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048},
        "as configured",
        "never",
        "llama",
        gguf_rotates_neighbours=True,
    ),
    "mistral": FamilyFiles(  # in GGUF a llama with a window
        "MistralForCausalLM",
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        "never",
        "on all layers",
        None,
        gguf_rotates_neighbours=True,
    ),
    "qwen2": FamilyFiles("Qwen2ForCausalLM", _SLIDING, "on qkv", "on some layers", "qwen2"),
    "qwen3": FamilyFiles("Qwen3ForCausalLM", {**_SLIDING, "head_dim": 128}, "as configured", "on some layers", "qwen3"),
    "mixtral": FamilyFiles(  # in GGUF a llama with experts
        "MixtralForCausalLM",
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        "never",
        "on all layers",
        None,
        gguf_rotates_neighbours=True,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen2_moe": FamilyFiles(
        "Qwen2MoeForCausalLM",
        {
            "max_position_embeddings": 32_768,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        "on qkv",
        "refused",
        "qwen2moe",
        experts=ExpertNames(),
    ),
    "qwen3_moe": FamilyFiles(
        "Qwen3MoeForCausalLM",
        {
            "max_position_embeddings": 32_768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        "as configured",
        "refused",
        "qwen3moe",
        experts=ExpertNames(),
    ),
    "gemma2": FamilyFiles(
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "never",
        "in a pattern",
        "gemma2",
        gguf_parts=_GEMMA_PARTS,
        gguf_end_tokens=("<end_of_turn>",),
        activation="gelu",
        norms_from_one=True,
        scales_embedding=True,
        outgrows_float16=True,
    ),
    "gemma3_text": FamilyFiles(
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            # Of the larger ones config.json says little: these are what it leaves out.
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        "never",
        "in a pattern",
        "gemma3",
        gguf_parts=_GEMMA_PARTS,
        gguf_end_tokens=("<end_of_turn>",),
        activation="gelu",
        norms_from_one=True,
        scales_embedding=True,
        outgrows_float16=True,
    ),
    "phi3": FamilyFiles(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        "never",
        "on all layers",
        "phi3",
        gguf_parts={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        gguf_end_tokens=("<|end|>", "<|endoftext|>"),
        rotates_a_part=True,
    ),
    "gpt_oss": FamilyFiles(
        "GptOssForCausalLM",
        {
            "max_position_embeddings": 131_072,
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        "as configured",
        "in a pattern",
        None,
        outgrows_float16=True,
        has_sinks=True,
        experts=ExpertNames(router="router", stacked="interleaved"),
    ),
    "qwen3_next": FamilyFiles(
        "Qwen3NextForCausalLM",
        {**_QWEN_HYBRID, **_QWEN_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
        "as configured",
        "never",
        None,
        norms_from_one=True,
        rotates_a_part=True,
        has_linear_attention=True,
        experts=ExpertNames(),
    ),
    "qwen3_5_text": FamilyFiles(
        "Qwen3_5ForConditionalGeneration",
        {**_QWEN_HYBRID, "num_key_value_heads": 4},
        "as configured",
        "never",
        None,
        norms_from_one=True,
        rotates_a_part=True,
        has_linear_attention=True,
    ),
    "qwen3_5_moe_text": FamilyFiles(
        "Qwen3_5MoeForConditionalGeneration",
        {**_QWEN_HYBRID, **_QWEN_EXPERTS, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
        "as configured",
        "never",
        None,
        norms_from_one=True,
        rotates_a_part=True,
        has_linear_attention=True,
        experts=ExpertNames(stacked="halves"),
    ),
}


def routers(config: ModelConfig) -> list[str]:
    """What decides whose a token is, in all layers: the modules that stay plain when all other linears get small."""
    names, experts = FAMILY_FILES[config.architecture].experts, config.experts
    if names is None or experts is None:
        return []
    gates = (names.router, "shared_expert_gate") if experts.shared_intermediate_size else (names.router,)
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    return [f"model.layers.{layer}.{names.block}.{gate}" for layer in layers for gate in gates]
