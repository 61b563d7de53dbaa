"""config.json of models that people have, as they are published but for keys that nobody reads: what we make of them,
and that they come to as many parameters as their makers say."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.model_config import Experts, ModelConfig, RopeScaling
from penstock.hub.hf_config import model_config
from penstock.hub.hf_directory import config_without_weights

SHORT, LONG = [1.0 + i / 50 for i in range(48)], [1.0 + i for i in range(48)]
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "phi-3-mini-4k": {
        "architectures": ["Phi3ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "bos_token_id": 100257,
        "eos_token_id": 100265,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "model_type": "phi3",
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 199999,
        "eos_token_id": 199999,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "phi3",
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
}


def read(name: str) -> ModelConfig:
    return config_without_weights(CONFIGS[name], {})


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("gemma-2-2b-it", 2.61, 2.61),
        ("gemma-3-1b-it", 1.0, 1.0),
        ("gemma-3-27b-it", 27.0, 27.0),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("phi-3-mini-4k", 3.82, 3.82),
        ("phi-4", 14.7, 14.7),
        ("phi-4-mini", 3.84, 3.84),
    ],
)
def test_it_has_as_many_parameters_as_its_model(name: str, billions: float, active: float) -> None:
    assert read(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert read(name).num_active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_gemma_2_alternates_and_caps() -> None:
    config = read("gemma-2-2b-it")
    assert config.windows == (4096, None) * 13
    assert (config.attention_cap, config.logit_cap, config.activation) == (50.0, 30.0, "gelu")
    assert (config.norm_offset, config.embedding_scale, config.query_scale) == (1.0, 48.0, 1 / 16)
    assert (config.tied_embeddings, config.eos_token_ids) == (True, (1, 107))


def test_gemma_3_sees_all_in_every_sixth_layer_and_turns_elsewhere_at_another_speed() -> None:
    config = read("gemma-3-1b-it")
    assert config.windows[:7] == (512, 512, 512, 512, 512, None, 512)
    assert (config.rope_theta, config.local_rope_theta, config.rope_scaling) == (1_000_000, 10_000, None)
    assert (config.attention_cap, config.logit_cap, config.eos_token_ids) == (None, None, (1, 106))


def test_gemma_3_with_images_is_the_part_that_speaks() -> None:
    config = read("gemma-3-27b-it")
    assert (config.architecture, config.vocab_size, config.context_length) == ("gemma3_text", 262_208, 131_072)
    assert config.rope_scaling == RopeScaling("linear", factor=8.0)
    assert (config.rope_theta, config.local_rope_theta) == (1_000_000, 10_000)
    assert config.query_scale == pytest.approx(168**-0.5)
    assert config.windows.count(None) == 10
    assert config.eos_token_ids == (1, 106)


def test_mixtures_say_who_is_chosen_and_how_they_are_weighed() -> None:
    assert read("mixtral-8x7b").experts == Experts(8, 2, 14_336, normalized=True)
    assert read("qwen3-30b-a3b").experts == Experts(128, 8, 768, normalized=True)
    assert read("qwen1.5-moe-a2.7b").experts == Experts(60, 4, 1408, normalized=False, shared_intermediate_size=5632)
    assert read("qwen1.5-moe-a2.7b").attention_bias
    assert read("mixtral-8x7b").windows == ()


def test_layers_without_experts_are_named() -> None:
    values = CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 6}
    experts = model_config(values, {}, has_head=True).experts
    assert experts is not None
    assert experts.dense_layers == (0, 2, 3, 4)


def test_phi_4_mini_rotates_three_quarters_of_a_head_by_two_sets_of_factors() -> None:
    config = read("phi-4-mini")
    assert (config.head_dim, config.rotary_dim, config.windows) == (128, 96, ())  # a window beyond the context is none
    scaling = config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.original_context) == ("longrope", 4096)
    assert (scaling.factors, scaling.long_factors) == (tuple(SHORT), tuple(LONG))
    assert scaling.magnitude == pytest.approx(1.1902380714)
    assert read("phi-3-mini-4k").windows == (2047,) * 32
    assert read("phi-4").rotary_dim is None


def test_all_tokens_that_end_a_turn_are_found() -> None:
    """Phi-3's config.json names one, its generation_config.json three."""
    config = model_config(CONFIGS["phi-3-mini-4k"], {"eos_token_id": [32000, 32001, 32007]}, has_head=True)
    assert config.eos_token_ids == (32000, 32001, 32007)
