"""config.json of newer families, as they are published but for keys that nobody reads: what we make of them, that they
come to as many parameters as their makers say, and that what would be another model is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import AttentionTemperature, Experts, ModelConfig, RopeScaling, Routing
from penstock.hub.hf_directory import config_without_weights

_LLAMA4: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 202048,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "vision_config": {"model_type": "llama4_vision_model"},
        "text_config": _LLAMA4
        | {
            "eos_token_id": [200001, 200007, 200008],
            "interleave_moe_layer_step": 1,
            "max_position_embeddings": 10485760,
            "num_local_experts": 16,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "use_qk_norm": True,
        },
    },
    "llama-4-maverick": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "vision_config": {"model_type": "llama4_vision_model"},
        "text_config": _LLAMA4
        | {
            "eos_token_id": [200001, 200007, 200008],
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "num_local_experts": 128,
            "rope_scaling": None,
            "use_qk_norm": False,
        },
    },
}

_GLM4: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
_GLM45: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 151552,
}
CONFIGS |= {
    "glm-4-9b-0414": _GLM4
    | {
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
    "glm-4-32b-0414": _GLM4
    | {
        "hidden_size": 6144,
        "intermediate_size": 23040,
        "num_attention_heads": 48,
        "num_hidden_layers": 61,
        "num_key_value_heads": 2,
    },
    "glm-4.5": _GLM45
    | {
        "first_k_dense_replace": 3,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "num_hidden_layers": 92,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "glm-4.5-air": _GLM45
    | {
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_hidden_layers": 46,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
}
_GRANITE: dict[str, Any] = {
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
CONFIGS |= {
    "granite-3.3-2b": _GRANITE
    | {
        "architectures": ["GraniteForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "model_type": "granite",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "vocab_size": 49159,
    },
    "granite-3.1-3b-a800m": _GRANITE
    | {
        "architectures": ["GraniteMoeForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "model_type": "granitemoe",
        "num_attention_heads": 24,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "vocab_size": 49155,
    },
    "granite-4.0-micro": _GRANITE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "layer_types": ["attention"] * 40,
        "logits_scaling": 10.0,
        "model_type": "granitemoehybrid",
        "num_attention_heads": 40,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 8192,
        "vocab_size": 100352,
    },
}
_OLMO: dict[str, Any] = {
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
CONFIGS |= {
    "olmo-2-7b": _OLMO
    | {
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rope_scaling": None,
        "vocab_size": 100352,
    },
    "olmo-3-32b": _OLMO
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "vocab_size": 100278,
    },
    "olmoe-1b-7b": _OLMO
    | {
        "architectures": ["OlmoeForCausalLM"],
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rope_theta": 10000.0,
        "vocab_size": 50304,
    },
}

CONFIGS |= {
    "ministral-3-8b": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": {
            "model_type": "pixtral",
        },
        "text_config": {
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 262144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": None,
            "vocab_size": 131072,
        },
    },
    "mistral-small-3.2-24b": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": {
            "model_type": "pixtral",
        },
        "text_config": {
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 128012,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "seed-oss-36b": {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "rope_type": "default",
        },
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 155136,
    },
    "ernie-4.5-0.3b": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5",
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000,
        "tie_word_embeddings": True,
        "use_bias": False,
        "vocab_size": 103424,
    },
    "exaone-4.0-32b": {
        "architectures": ["Exaone4ForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "dots.llm1": {
        "architectures": ["Dots1ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "model_type": "dots1",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "vocab_size": 152064,
    },
}


def read(name: str, **changes: Any) -> ModelConfig:
    config = CONFIGS[name]
    if "text_config" in config:
        return config_without_weights(config | {"text_config": config["text_config"] | changes}, {})
    return config_without_weights(config | changes, {})


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-4-scout", 107.8, 17.2),
        ("llama-4-maverick", 400.7, 17.2),
        ("glm-4-9b-0414", 9.4, 9.4),
        ("glm-4-32b-0414", 32.5, 32.5),
        ("glm-4.5", 355, 33),
        ("glm-4.5-air", 106, 13.2),
        ("ministral-3-8b", 8.49, 8.49),
        ("mistral-small-3.2-24b", 23.6, 23.6),
        ("smollm3-3b", 3.08, 3.08),
        ("seed-oss-36b", 36.2, 36.2),
        ("ernie-4.5-0.3b", 0.36, 0.36),
        ("exaone-4.0-32b", 32.0, 32.0),
        ("minimax-m2", 229, 11),
        ("dots.llm1", 142, 14),
        ("olmo-2-7b", 7.3, 7.3),
        ("olmo-3-32b", 32.2, 32.2),
        ("olmoe-1b-7b", 6.92, 1.28),
        ("granite-3.3-2b", 2.53, 2.53),
        ("granite-3.1-3b-a800m", 3.3, 0.88),
        ("granite-4.0-micro", 3.4, 3.4),
    ],
)
def test_it_has_as_many_parameters_as_its_model(name: str, billions: float, active: float) -> None:
    """Embedding and head are among the active ones, which some makers leave out."""
    assert read(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert read(name).num_active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama-4-scout", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("llama-4-scout", {"layer_types": ["sliding_attention"] * 48}, "sliding_attention"),
        ("llama-4-scout", {"hidden_act": "gelu"}, "activation"),
        ("granite-4.0-micro", {"layer_types": ["mamba", *["attention"] * 39]}, "Mamba"),
        ("granite-4.0-micro", {"layer_types": None}, "Mamba"),
        ("olmo-2-7b", {"attention_bias": True}, "attention_bias"),
        ("seed-oss-36b", {"attention_out_bias": True}, "attention_out_bias"),
        ("ernie-4.5-0.3b", {"use_bias": True}, "use_bias"),
        ("minimax-m2", {"attn_type_list": [0, 1]}, "linear attention"),
        ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("smollm3-3b", {"use_sliding_window": True}, "use_sliding_window"),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv"),
        ("granite-4.0-micro", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("glm-4.5", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm-4-9b-0414", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_another_model_is_refused_by_name(name: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        read(name, **change)


@pytest.mark.parametrize(("name", "change"), [("llama-4-scout", {"no_rope_layers": [1, 0]})])
def test_lists_that_are_too_short_are_no_model(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ModelCorrupt):
        read(name, **change)


def test_llama_4_sees_chunks_where_it_is_rotated() -> None:
    scout, maverick = read("llama-4-scout"), read("llama-4-maverick")
    assert (scout.architecture, scout.vision, scout.context_length) == ("llama4_text", None, 10_485_760)
    assert (scout.windows[:5], scout.in_chunks) == ((8192, 8192, 8192, None, 8192), True)
    assert scout.unrotated_layers == tuple(range(3, 48, 4))
    assert scout.temperature == AttentionTemperature(0.1, 8192)
    assert scout.rope_scaling == RopeScaling("llama3", 16.0, 1.0, 1.0, 8192)
    assert (scout.head_norms, maverick.head_norms) == (True, False)
    assert scout.experts == Experts(16, 1, 8192, shared_intermediate_size=8192, shared_gate=False)
    assert maverick.experts is not None
    assert maverick.experts.dense_layers == tuple(range(0, 48, 2))
    assert maverick.intermediate_size == 16_384
    assert scout.eos_token_ids == (200001, 200007, 200008)


def test_glm_4_rotates_half_of_each_head() -> None:
    dense, large, air = read("glm-4-9b-0414", attention_bias=True), read("glm-4.5"), read("glm-4.5-air")
    for config in (dense, large, air):
        assert (config.head_dim, config.rotary_dim, config.attention_bias, config.output_bias) == (128, 64, True, False)
    assert (large.head_norms, air.head_norms) == (True, False)
    assert large.experts == Experts(
        160, 8, 1536, True, 1536, dense_layers=(0, 1, 2), shared_gate=False, routing=Routing("sigmoid", scale=2.5)
    )


def test_granite_scales_what_it_adds() -> None:
    config = read("granite-3.3-2b")
    assert (config.embedding_scale, config.query_scale, config.residual_scale) == (12.0, 1 / 64, 0.22)
    assert config.logit_divisor == 8.0
    assert config.experts is None
    assert read("granite-3.1-3b-a800m").experts == Experts(40, 8, 512, shared_gate=False)
    without_experts = read("granite-4.0-micro")
    assert (without_experts.experts, without_experts.intermediate_size) == (None, 8192)
    assert without_experts.unrotated_layers == ()
    assert read("granite-4.0-micro", position_embedding_type="nope").unrotated_layers == tuple(range(40))


@pytest.mark.parametrize("is_new", [False, True])
def test_olmo_3_stretches_the_rotation_of_layers_that_see_all(is_new: bool) -> None:
    given: dict[str, Any] = CONFIGS["olmo-3-32b"]["rope_scaling"]
    full = {**given, "rope_theta": 300_000}
    both = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 200_000}}
    changes = {"rope_scaling": None, "rope_theta": None, "rope_parameters": both} if is_new else {"rope_theta": 300_000}
    config = read("olmo-3-32b", **changes)
    assert config.windows[:5] == (4096, 4096, 4096, None, 4096)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("yarn", 8.0)
    assert (config.rope_theta, config.local_rope_theta) == (300_000, 200_000 if is_new else 300_000)


def test_layers_that_are_not_rotated_are_named() -> None:
    assert read("smollm3-3b").unrotated_layers == tuple(range(3, 36, 4))
    assert read("smollm3-3b", no_rope_layers=None).unrotated_layers == tuple(range(3, 36, 4))
    exaone = read("exaone-4.0-32b")
    assert exaone.unrotated_layers == tuple(range(3, 64, 4))
    assert exaone.windows[:4] == (4096, 4096, 4096, None)
    assert read("exaone-4.0-32b", sliding_window=None, layer_types=None).unrotated_layers == ()


def test_ministral_3_grows_its_queries_and_stretches_by_yarn() -> None:
    config = read("ministral-3-8b")
    assert (config.architecture, config.vision) == ("ministral3", None)
    assert config.temperature == AttentionTemperature(0.1, 16_384, first=0)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.magnitude) == ("yarn", 1.0)
    small = read("mistral-small-3.2-24b")
    assert (small.architecture, small.windows, small.temperature) == ("mistral", (), None)


def test_minimax_m2_rotates_half_of_each_head() -> None:
    config = read("minimax-m2")
    assert (config.rotary_dim, config.head_dim) == (64, 128)
    assert config.experts == Experts(256, 8, 1536, shared_gate=False, routing=Routing("sigmoid"))
