"""An encoder of random weights, without files."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.model.encoder import Affine, Encoder, EncoderLayer


def random_encoder(
    layers: int,
    hidden: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    head_dim: int = 64,
    vocab: int = 30_522,
    context: int = 512,
) -> Encoder:
    """The same on every device, up to rounding."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> Tensor:
        return (mean + scale * torch.randn(shape, generator=generator)).to(device, dtype)

    def affine(outputs: int, inputs: int) -> Affine:
        return Affine(normal(outputs, inputs, scale=inputs**-0.5), normal(outputs, scale=0.1))

    def norm() -> Affine:
        return Affine(normal(hidden, scale=0.1, mean=1.0), normal(hidden, scale=0.1))

    def layer() -> EncoderLayer:
        qkv, output = affine(3 * hidden, hidden), affine(hidden, hidden)
        return EncoderLayer(qkv, output, norm(), affine(4 * hidden, hidden), affine(hidden, 4 * hidden), norm())

    heads = hidden // head_dim
    config = ModelConfig(
        architecture="bert",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        context_length=context,
        norm_eps=1e-12,
    )
    words, places = normal(vocab, hidden, scale=1.0), normal(context, hidden, scale=1.0)
    return Encoder(config, words, places, norm(), [layer() for _ in range(layers)])
