"""The shapes of well-known models by name, and shapes given in numbers: for those who have no files of a model."""

from __future__ import annotations

from typing import Any

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.core.model_config import ClampedSwiGLU, Experts, ModelConfig


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
