"""config.json of DeepSeek's models and of those that took their shape, as they are published but for keys that nobody
reads: what we make of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import LatentAttention, ModelConfig, Routing
from penstock.hub.hf_directory import config_without_weights

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI = V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2_LITE = {name: value for name, value in V3.items() if name != "num_nextn_predict_layers"} | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def read(config: dict[str, Any]) -> ModelConfig:
    return config_without_weights(config, {})


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_bytes"),
    [(V3, 671, 37.6, 70_272), (KIMI, 1026, 32.9, 70_272), (V2_LITE, 15.7, 2.66, 31_104)],
    ids=["V3", "Kimi-K2", "V2-Lite"],
)
def test_it_has_as_many_parameters_as_its_model_and_few_bytes_a_token(
    config: dict[str, Any], billions: float, active: float, kv_bytes: int
) -> None:
    found = read(config)
    assert found.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert found.num_active_parameters / 1e9 == pytest.approx(active, rel=0.005)
    assert found.kv_bytes_per_token(2) == kv_bytes


def test_deepseek_v3() -> None:
    config = read(V3)
    assert config.latent == LatentAttention(512, 1536, 128, 64, 128)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.cached_value_dim) == (128, 1, 576, 512)
    assert config.query_scale == pytest.approx(192**-0.5 * 1.3688879**2)  # 0.1 ln 40 + 1
    assert config.rope_scaling is not None
    assert config.rope_scaling.magnitude == 1.0
    assert config.experts is not None
    assert config.experts.routing == Routing("sigmoid", True, 8, 4, "best two", 2.5)
    assert config.experts.dense_layers == (0, 1, 2)


def test_deepseek_v2_lite_makes_queries_of_the_stream_and_weighs_by_softmax() -> None:
    config = read(V2_LITE)
    assert config.latent == LatentAttention(512, None, 128, 64, 128)
    assert config.experts is not None
    assert config.experts.routing == Routing("softmax", False, 1, 1, "best", 1.0)
    assert config.experts.shared_intermediate_size == 2816


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (V3, {"attention_bias": True}, "attention_bias"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob True"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        read(config | changes)


@pytest.mark.parametrize("changes", [{"n_group": 7}, {"topk_group": 9}, {"kv_lora_rank": 0}, {"qk_rope_head_dim": 63}])
def test_sizes_that_cannot_be_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelCorrupt, match="cannot be"):
        read(V3 | changes)
