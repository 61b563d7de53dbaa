"""The shapes of well-known models by name, and shapes given in numbers: for those who have no files of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.core.model_config import (
    AttentionTemperature,
    ClampedSwiGLU,
    Experts,
    LatentAttention,
    LinearAttention,
    ModelConfig,
    Routing,
)


def _deepseek(
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    latent: LatentAttention,
    experts: Experts,
    *,
    vocab: int,
    context: int,
    family: str = "deepseek_v3",
    dense: int = 1,
) -> ModelConfig:
    """Shape of an MLA mixture of experts whose first layers are dense. A token's cache entry is one head of keys."""
    return ModelConfig(
        architecture=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent.cached_dim,
        context_length=context,
        query_scale=latent.query_dim**-0.5,
        latent=latent,
        experts=replace(experts, dense_layers=tuple(range(dense)), shared_gate=False),
    )


def _shape(
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    head_dim: int = 128,
    *,
    kv_heads: int = 8,
    vocab: int = 128_256,
    tied: bool = False,
    context: int = 131_072,
    family: str = "llama",
    experts: Experts | None = None,
    **more: Any,
) -> ModelConfig:
    return ModelConfig(
        architecture=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        rope_theta=500_000.0,
        tied_embeddings=tied,
        experts=experts,
        **more,
    )


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    return _shape(
        2880,
        2880,
        layers,
        64,
        64,
        vocab=201_088,
        family="gpt_oss",
        experts=Experts(experts, 4, 2880, has_biases=True, activation=ClampedSwiGLU()),
        windows=(128, None) * (layers // 2),
        attention_bias=True,
        output_bias=True,
        attention_sinks=True,
        quantization="mxfp4",
    )


def _llama4(experts: Experts, *, context: int) -> ModelConfig:
    """Shape with chunked attention and unrotated layers, so that a random model computes what the real one does."""
    shape = _shape(5120, 16_384, 48, 40, vocab=202_048, context=context, family="llama4_text", experts=experts)
    full = tuple(range(3, 48, 4))
    return replace(
        shape,
        windows=tuple(None if layer in full else 8192 for layer in range(48)),
        in_chunks=True,
        unrotated_layers=full,
        temperature=AttentionTemperature(),
    )


def _hybrid(
    hidden: int, ffn: int, layers: int, *, kv_heads: int, vocab: int, family: str, experts: Experts | None = None
) -> ModelConfig:
    """Three layers of linear attention, then one of full attention."""
    shape = _shape(
        hidden,
        ffn,
        layers,
        16,
        256,
        kv_heads=kv_heads,
        vocab=vocab,
        context=262_144,
        family=family,
        experts=experts,
    )
    linear = LinearAttention(tuple(layer for layer in range(layers) if (layer + 1) % 4), 16, 32, 128, 128, 4)
    return replace(shape, rope_theta=10_000_000.0, rotary_dim=64, norm_offset=1.0, output_gate=True, linear=linear)


SHAPES = {
    "tiny": _shape(64, 128, 2, 8, 16, vocab=512, context=8192),  # to see that everything runs
    "llama1b": _shape(2048, 8192, 16, 32, 64, tied=True),
    "llama3b": _shape(3072, 8192, 28, 24, tied=True),
    "llama8b": _shape(4096, 14_336, 32, 32),
    "llama70b": _shape(8192, 28_672, 80, 64),
    "llama405b": _shape(16_384, 53_248, 126, 128),
    "mistral24b": _shape(5120, 32_768, 40, 32, vocab=131_072, context=32_768, family="mistral"),
    "qwen3-8b": _shape(4096, 12_288, 36, 32, vocab=151_936, context=40_960, family="qwen3"),
    "qwen3-32b": _shape(5120, 25_600, 64, 64, vocab=151_936, context=40_960, family="qwen3"),
    "qwen3-30b-a3b": _shape(
        2048, 6144, 48, 32, kv_heads=4, vocab=151_936, context=40_960, family="qwen3_moe", experts=Experts(128, 8, 768)
    ),
    "mixtral-8x7b": _shape(
        4096, 14_336, 32, 32, vocab=32_000, context=32_768, family="mixtral", experts=Experts(8, 2, 14_336)
    ),
    "llama4-scout": _llama4(Experts(16, 1, 8192, shared_intermediate_size=8192, shared_gate=False), context=10_485_760),
    "llama4-maverick": _llama4(
        Experts(128, 1, 8192, shared_intermediate_size=8192, shared_gate=False, dense_layers=tuple(range(0, 48, 2))),
        context=1_048_576,
    ),
    "deepseek-v2-lite": _deepseek(
        2048,
        10_944,
        27,
        16,
        LatentAttention(512, None, 128, 64, 128),
        Experts(
            64, 6, 1408, normalized=False, shared_intermediate_size=2816, routing=Routing("softmax", has_bias=False)
        ),
        vocab=102_400,
        context=163_840,
        family="deepseek_v2",
    ),
    "deepseek-v3": _deepseek(  # and R1, and V3.1
        7168,
        18_432,
        61,
        128,
        LatentAttention(512, 1536, 128, 64, 128),
        Experts(
            256,
            8,
            2048,
            shared_intermediate_size=2048,
            routing=Routing(num_groups=8, groups_per_token=4, scale=2.5),
        ),
        vocab=129_280,
        context=163_840,
        dense=3,
    ),
    "kimi-k2": _deepseek(
        7168,
        18_432,
        61,
        64,
        LatentAttention(512, 1536, 128, 64, 128),
        Experts(384, 8, 2048, shared_intermediate_size=2048, routing=Routing(scale=2.827)),
        vocab=163_840,
        context=131_072,
        family="kimi_k2",
    ),
    "glm-4.7-flash": _deepseek(
        2048,
        10_240,
        47,
        20,
        LatentAttention(512, 768, 192, 64, 256),
        Experts(64, 4, 1536, shared_intermediate_size=1536, routing=Routing(scale=1.8)),
        vocab=154_880,
        context=202_752,
        family="glm4_moe_lite",
    ),
    "qwen3-next-80b-a3b": _hybrid(
        2048, 5120, 48, kv_heads=2, vocab=151_936, family="qwen3_next", experts=Experts(512, 10, 512, True, 512)
    ),
    "qwen3.5-9b": _hybrid(4096, 12_288, 32, kv_heads=4, vocab=248_320, family="qwen3_5_text"),
    "qwen3.5-35b-a3b": _hybrid(
        2048, 512, 40, kv_heads=2, vocab=248_320, family="qwen3_5_moe_text", experts=Experts(256, 8, 512, True, 512)
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
NUMBERS = ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocab", "context", "tied")


def shape(name: str) -> ModelConfig:
    if name not in SHAPES:
        hint = nearest(name, SHAPES)
        suggestion = f"; did you mean {hint!r}?" if hint else ""
        raise ConfigError(f"no shape {name!r}{suggestion} There are {', '.join(SHAPES)}", param="shape")
    return SHAPES[name]


def shape_from_numbers(text: str) -> ModelConfig:
    """`hidden=8192,ffn=28672,layers=80,heads=64[,kv_heads=8][,head_dim=128][,vocab=128256][,context=131072][,tied=1]`"""
    numbers: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in NUMBERS:
            hint = nearest(name, NUMBERS)
            raise ConfigError(
                f"a shape has no {name!r}"
                + (f"; did you mean {hint!r}?" if hint else f"; it has {', '.join(NUMBERS)}"),
                param="shape",
            )
        if not value.isdecimal() or (int(value) == 0 and name != "tied"):
            raise ConfigError(f"{name}={value} of a shape is not a positive whole number", param="shape")
        numbers[name] = int(value)
    if missing := [name for name in NUMBERS[:4] if name not in numbers]:
        raise ConfigError(f"a shape needs {', '.join(missing)} too", param="shape")
    heads = numbers["heads"]
    kv_heads = numbers.get("kv_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{heads} heads cannot share {kv_heads} heads of keys and values", param="shape")
    return _shape(
        numbers["hidden"],
        numbers["ffn"],
        numbers["layers"],
        heads,
        numbers.get("head_dim", max(1, numbers["hidden"] // heads)),
        kv_heads=kv_heads,
        vocab=numbers.get("vocab", 128_256),
        tied=bool(numbers.get("tied", 0)),
        context=numbers.get("context", 131_072),
    )
