"""Small models of every family that a GPU's kernels must serve. What they bring is in the sizes here: caps and windows,
parts of heads rotated, heads of Phi-3's and Gemma's sizes, experts that are chosen by many, few and nobody."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.model_config import (
    AttentionTemperature,
    ClampedSwiGLU,
    Experts,
    LatentAttention,
    LinearAttention,
    ModelConfig,
    RopeScaling,
    Routing,
)

SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=400,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    context_length=256,
)
GEMMA = replace(
    SHAPE,
    head_dim=256,
    windows=(20, None),
    query_scale=0.11,
    activation="gelu",
    norm_offset=1.0,
    embedding_scale=11.3,
    tied_embeddings=True,
)
PHI = replace(SHAPE, architecture="phi3", head_dim=96)
FACTORS = tuple(1.0 + 0.25 * i for i in range(36))
LATENT = LatentAttention(rank=48, query_rank=40, plain_dim=24, rotary_dim=16, value_dim=32)
DEEPSEEK = replace(SHAPE, num_kv_heads=1, head_dim=LATENT.cached_dim, query_scale=0.15, latent=LATENT)
GROUPS = Routing(num_groups=4, groups_per_token=2, scale=2.5)
LONG = RopeScaling("longrope", original_context=64, factors=FACTORS, long_factors=FACTORS, magnitude=1.1)
STRETCHED = RopeScaling("yarn", factor=4.0, original_context=64, magnitude=1.1)
# Linear attention takes turns with attention, so that each stage of a pipeline has some of both.
HYBRID = replace(
    SHAPE,
    num_layers=4,
    head_dim=64,
    rotary_dim=16,
    norm_offset=1.0,
    output_gate=True,
    linear=LinearAttention((0, 2), num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=32, kernel_size=4),
)
CONFIGS = {
    "mixtral": replace(SHAPE, architecture="mixtral", experts=Experts(8, 2, 192)),
    "qwen2-moe": replace(
        SHAPE,
        architecture="qwen2_moe",
        attention_bias=True,
        experts=Experts(12, 4, 96, normalized=False, shared_intermediate_size=160, dense_layers=(1,)),
    ),
    "qwen3-moe": replace(SHAPE, architecture="qwen3_moe", experts=Experts(40, 8, 64)),
    "gpt-oss": replace(
        SHAPE,
        architecture="gpt_oss",
        num_heads=8,
        attention_bias=True,
        output_bias=True,
        attention_sinks=True,
        windows=(20, None),
        experts=Experts(8, 4, 64, has_biases=True, activation=ClampedSwiGLU()),
    ),
    "gemma2": replace(GEMMA, architecture="gemma2", attention_cap=3.0, logit_cap=5.0),
    "gemma3": replace(GEMMA, architecture="gemma3_text", local_rope_theta=100.0),
    "phi3": replace(PHI, windows=(24, 24)),
    "phi4": replace(PHI, head_dim=128, rotary_dim=96),
    "phi4-long": replace(PHI, rotary_dim=72, rope_scaling=LONG),
    "olmo2": replace(SHAPE, architecture="olmo2"),
    "exaone4": replace(SHAPE, architecture="exaone4", windows=(20, None), unrotated_layers=(1,)),
    "ministral3": replace(SHAPE, architecture="ministral3", temperature=AttentionTemperature(0.3, 20, first=0)),
    "minimax-m2": replace(
        SHAPE,
        architecture="minimax_m2",
        rotary_dim=16,
        experts=Experts(16, 3, 64, shared_gate=False, routing=Routing("sigmoid")),
    ),
    "olmo3": replace(
        SHAPE,
        architecture="olmo3",
        num_layers=3,
        windows=(20, None, 20),
        local_rope_theta=200.0,
        rope_scaling=STRETCHED,
    ),
    "olmoe": replace(SHAPE, architecture="olmoe", experts=Experts(8, 2, 64, normalized=False)),
    "granite-moe": replace(
        SHAPE,
        architecture="granitemoeshared",
        embedding_scale=3.0,
        query_scale=0.15,
        residual_scale=0.4,
        logit_divisor=1.5,
        unrotated_layers=(1,),
        experts=Experts(6, 2, 96, shared_intermediate_size=96, shared_gate=False),
    ),
    "glm4": replace(SHAPE, architecture="glm4", attention_bias=True, rotary_dim=16),
    "glm4-moe": replace(
        SHAPE,
        architecture="glm4_moe",
        num_kv_heads=1,
        attention_bias=True,
        rotary_dim=16,
        experts=Experts(
            16,
            3,
            64,
            shared_intermediate_size=64,
            dense_layers=(0,),
            shared_gate=False,
            routing=Routing("sigmoid", True, 4, 2),
        ),
    ),
    "llama4": replace(
        SHAPE,
        architecture="llama4_text",
        num_layers=3,
        windows=(16, None, 16),
        in_chunks=True,
        unrotated_layers=(1,),
        temperature=AttentionTemperature(0.3, 12),
        experts=Experts(6, 1, 96, shared_intermediate_size=96, shared_gate=False, dense_layers=(0,)),
    ),
    "deepseek-v2": replace(
        DEEPSEEK,
        architecture="deepseek_v2",
        latent=replace(LATENT, query_rank=None),
        experts=Experts(
            8,
            2,
            96,
            normalized=False,
            shared_intermediate_size=192,
            dense_layers=(0,),
            shared_gate=False,
            routing=Routing("softmax", has_bias=False, scale=1.2),
        ),
    ),
    "deepseek-v3": replace(
        DEEPSEEK,
        architecture="deepseek_v3",
        experts=Experts(16, 4, 64, shared_intermediate_size=96, dense_layers=(0,), shared_gate=False, routing=GROUPS),
    ),
    "qwen3-next": replace(
        HYBRID, architecture="qwen3_next", experts=Experts(12, 4, 96, normalized=True, shared_intermediate_size=160)
    ),
    "qwen3.5": replace(HYBRID, architecture="qwen3_5_text"),
}
# Families whose layers are those of families above, with settings of their own: kernels know no difference.
MORE_CONFIGS = {
    "smollm3": replace(SHAPE, architecture="smollm3", num_layers=3, unrotated_layers=(1,), tied_embeddings=True),
    "seed-oss": replace(SHAPE, architecture="seed_oss", attention_bias=True),
    "ernie4.5": replace(SHAPE, architecture="ernie4_5", tied_embeddings=True),
    "granite": replace(
        SHAPE, architecture="granite", embedding_scale=3.0, query_scale=0.15, residual_scale=0.4, logit_divisor=1.5
    ),
    "granite-moe, none shared": replace(
        CONFIGS["granite-moe"], architecture="granitemoe", experts=Experts(6, 2, 96, shared_gate=False)
    ),
    "granite4": replace(CONFIGS["granite-moe"], architecture="granitemoehybrid"),
    "dots1": replace(
        SHAPE,
        architecture="dots1",
        experts=Experts(
            16, 3, 64, shared_intermediate_size=64, dense_layers=(0,), shared_gate=False, routing=Routing("sigmoid")
        ),
    ),
    "glm": replace(SHAPE, architecture="glm", attention_bias=True, rotary_dim=16),
    "kimi-k2": replace(CONFIGS["deepseek-v3"], architecture="kimi_k2"),
    "glm4-moe-lite": replace(CONFIGS["deepseek-v3"], architecture="glm4_moe_lite"),
    "qwen3.5-moe": replace(
        CONFIGS["qwen3.5"],
        architecture="qwen3_5_moe_text",
        experts=Experts(12, 4, 96, normalized=True, shared_intermediate_size=160),
    ),
}
