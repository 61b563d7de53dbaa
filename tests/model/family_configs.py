"""Small models of every family that a GPU's kernels must serve. What they bring is in the sizes here: caps and windows,
parts of heads rotated, heads of Phi-3's and Gemma's sizes, experts that are chosen by many, few and nobody."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.model_config import ClampedSwiGLU, Experts, ModelConfig, RopeScaling

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
LONG = RopeScaling("longrope", original_context=64, factors=FACTORS, long_factors=FACTORS, magnitude=1.1)
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
}
