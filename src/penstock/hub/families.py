"""File layouts of each family: the names that the formats use, and what they leave unsaid. A family is one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.core.model_config import ModelConfig

CHOICE_BIAS = "e_score_correction_bias"  # of a router: see `core.model_config.Routing`


@dataclass(frozen=True)
class ExpertNames:
    """Hugging Face's names of a mixture's parts, below a layer."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    # Order of gate and up in files of families whose experts are one tensor; None: each has tensors of its own.
    # "halves": gate first, as outputs of one tensor; "rows": likewise, in tensors of [experts, out, in]. "granite": see
    # `hub.granite_names`.
    stacked: Literal["interleaved", "halves", "rows", "granite"] | None = None
    dense: str = "mlp"  # where layers without experts have their MLP
    shared: str = "shared_expert"  # the one that every token passes
    choice_bias: str = f"gate.{CHOICE_BIAS}"  # see `core.model_config.Routing`


@dataclass(frozen=True)
class FamilyFiles:
    hf_class: str  # what config.json calls the model's class
    hf_defaults: Mapping[str, Any]  # what transformers takes for a key that config.json does not have
    # Biases of the attention: on all four projections if the config says so; on q, k and v without its saying so.
    # "qkv as configured": on q, k and v if it says so. "refused": if it says so, since no checkpoint has them.
    biases: Literal["as configured", "qkv as configured", "on qkv", "never", "refused"]
    # Sliding windows: on every layer that has a window configured, or on the layers that the config lists. "in a
    # pattern": on all but every n-th. "refused": no checkpoint has them, and how they would be meant is not known. "in
    # chunks": on the layers that the config lists, and it does not call them windows.
    windows: Literal["never", "on all layers", "on some layers", "in a pattern", "in chunks", "refused"]
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
    norms_all_heads: bool = False  # norms of queries and keys are over all heads together
    only_read: bool = False  # its config.json is not written: `penstock convert` and `penstock quantize` refuse it
    has_linear_attention: bool = False  # most of its layers have, and the others' attention has a gate
    experts: ExpertNames | None = None
    has_latents: bool = False  # its attention has: see `core.model_config.LatentAttention`


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
_GLM = FamilyFiles(
    "GlmForCausalLM",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "qkv as configured",
    "never",
    None,
    rotates_a_part=True,
)
_GRANITE: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_MOE = FamilyFiles(
    "GraniteMoeForCausalLM",
    {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    "as configured",
    "never",
    None,
    only_read=True,
    experts=ExpertNames("block_sparse_moe", router="router.layer", stacked="granite"),
)
_LATENTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = FamilyFiles(
    "DeepseekV3ForCausalLM",
    {
        **_LATENTS,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "refused",
    "never",
    None,
    experts=ExpertNames(shared="shared_experts"),
    has_latents=True,
)

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
            # Values that config.json of the larger ones leaves out; it says little.
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
    "llama4_text": FamilyFiles(
        "Llama4ForCausalLM",
        {
            "vocab_size": 202_048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "tie_word_embeddings": False,
        },
        "as configured",
        "in chunks",
        None,
        outgrows_float16=True,
        only_read=True,
        experts=ExpertNames(block="feed_forward", router="router", stacked="halves", dense="feed_forward"),
    ),
    "granite": FamilyFiles(
        "GraniteForCausalLM", _GRANITE, "as configured", "never", "granite", gguf_rotates_neighbours=True
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(_GRANITE_MOE, hf_class="GraniteMoeSharedForCausalLM"),
    "granitemoehybrid": replace(_GRANITE_MOE, hf_class="GraniteMoeHybridForCausalLM"),
    "olmo2": FamilyFiles(
        "Olmo2ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        "refused",
        "refused",
        "olmo2",
        gguf_parts={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        norms_all_heads=True,
    ),
    "olmo3": FamilyFiles(
        "Olmo3ForCausalLM",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 500_000.0,
        },
        "refused",
        "in a pattern",
        None,
        norms_all_heads=True,
        only_read=True,
    ),
    "olmoe": FamilyFiles(
        "OlmoeForCausalLM",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        "refused",
        "never",
        "olmoe",
        norms_all_heads=True,
        experts=ExpertNames(),
    ),
    "ministral3": FamilyFiles(
        "Ministral3ForCausalLM",
        {
            "max_position_embeddings": 262_144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "refused",
        "on all layers",
        None,
        only_read=True,
    ),
    "smollm3": FamilyFiles(
        "SmolLM3ForCausalLM",
        {
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
        "as configured",
        "refused",
        "smollm3",
        gguf_rotates_neighbours=True,
    ),
    "seed_oss": FamilyFiles(
        "SeedOssForCausalLM",
        {"max_position_embeddings": 524_288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        "qkv as configured",
        "never",
        None,
    ),
    "ernie4_5": FamilyFiles(
        "Ernie4_5ForCausalLM",
        {
            "max_position_embeddings": 131_072,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        "refused",
        "never",
        None,
    ),
    "exaone4": FamilyFiles(
        "Exaone4ForCausalLM",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        "refused",
        "in a pattern",
        None,
        only_read=True,
    ),
    "minimax_m2": FamilyFiles(
        "MiniMaxM2ForCausalLM",
        {
            "max_position_embeddings": 196_608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5_000_000.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
        },
        "refused",
        "never",
        None,
        rotates_a_part=True,
        norms_all_heads=True,
        only_read=True,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", choice_bias=CHOICE_BIAS),
    ),
    "dots1": FamilyFiles(
        "Dots1ForCausalLM",
        {
            "max_position_embeddings": 2048,
            "n_shared_experts": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        "as configured",
        "refused",
        None,
        only_read=True,
        experts=ExpertNames(shared="shared_experts"),
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        hf_class="Glm4ForCausalLM",
        gguf_name="glm4",
        gguf_parts={
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4_moe": FamilyFiles(
        "Glm4MoeForCausalLM",
        {
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "use_qk_norm": False,
        },
        "qkv as configured",
        "never",
        None,
        rotates_a_part=True,
        only_read=True,
        experts=ExpertNames(shared="shared_experts"),
    ),
    "deepseek_v2": FamilyFiles(
        "DeepseekV2ForCausalLM",
        {
            **_LATENTS,
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1407,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "scoring_func": "softmax",
        },
        "refused",
        "never",
        None,
        experts=ExpertNames(shared="shared_experts"),
        has_latents=True,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,  # its files name DeepSeek's class
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        hf_class="Glm4MoeLiteForCausalLM",
        hf_defaults={
            **_DEEPSEEK_V3.hf_defaults,
            "max_position_embeddings": 202_752,
            "first_k_dense_replace": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
        },
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
        experts=ExpertNames(stacked="rows"),
    ),
}


def routers(config: ModelConfig) -> list[str]:
    """Routers of all layers' experts: the modules that stay plain when all other linears get small."""
    names, experts = FAMILY_FILES[config.architecture].experts, config.experts
    if names is None or experts is None:
        return []
    gates = (names.router, "shared_expert_gate") if experts.shared_intermediate_size else (names.router,)
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    return [f"model.layers.{layer}.{names.block}.{gate}" for layer in layers for gate in gates]
