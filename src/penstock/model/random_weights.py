"""A checkpoint that was never trained: the right shapes, reproducible numbers, no file."""

from __future__ import annotations

import math
import zlib
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.errors import ModelMissing
from penstock.core.model_config import Experts, LatentAttention, LinearAttention, ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.hub.families import FAMILY_FILES
from penstock.hub.stored import FloatArray, Part, StoredTensor
from penstock.model.vision.shapes import vision_shapes

MAX_DRAWN_BY_CPU = 1 << 22  # numbers of one matrix
SMALL_MODEL = 1 << 30  # parameters: matrices of a larger one are not drawn by the CPU, however small each expert is


class RandomCheckpoint:
    """Holds every tensor that any family asks for; a tensor depends on the seed and its name alone.

    A server can serve it with a tokenizer, as if it were a real model.
    """

    def __init__(
        self, config: ModelConfig, seed: int = 0, tokenizer_source: TokenizerFiles | TokenizerMetadata | None = None
    ) -> None:
        self._config = config
        self._seed = seed
        self._tokenizer_source = tokenizer_source
        self._norm_mean = 1.0 - config.norm_offset
        self._is_large = config.num_parameters > SMALL_MODEL

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return tensor_shapes(self._config)

    @property
    def path(self) -> Path:
        return Path("random")

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer_source(self) -> TokenizerFiles | TokenizerMetadata:
        if self._tokenizer_source is None:
            raise ModelMissing("a random model has no tokenizer")
        return self._tokenizer_source

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(self.tensor(name), "F32")

    def tensor(self, name: str) -> FloatArray:
        array: FloatArray = self.draw(name, torch.device("cpu")).float().numpy()
        return array

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0

    def draw(self, name: str, device: torch.device, part: Part | None = None) -> Tensor:
        """One tensor on the device. A small model is the same on every device: its tensors are drawn by the CPU.

        A CPU would take minutes over a large one, so those are drawn where they are wanted, and in bfloat16: each
        kind of device has its own numbers then.
        """
        shape = self._shapes[name]
        is_large = math.prod(shape) >= MAX_DRAWN_BY_CPU or (len(shape) == 2 and self._is_large)
        source = device if is_large else torch.device("cpu")
        # Not the seed beside the name: of a seed, torch's generator for the CPU takes the lower 32 bits.
        dice = torch.Generator(source).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        # A linear keeps the size of what passes through it; a norm stays near one; a bias near zero.
        mean, deviation = (0.0, shape[1] ** -0.5) if len(shape) == 2 else ("norm" in name and self._mean_of(name), 0.1)
        if len(shape) == 3:  # a convolution
            deviation = shape[2] ** -0.5
        noise = torch.empty(shape, dtype=torch.bfloat16 if is_large else torch.float32, device=source)
        drawn = noise.normal_(mean, deviation, generator=dice).to(device)
        if part is None:
            return drawn
        part.check(shape, name)
        return (drawn[part.rows] if part.columns is None else drawn[part.rows, part.columns]).clone()

    def _mean_of(self, norm: str) -> float:
        return 1.0 if ".linear_attn." in norm else self._norm_mean  # linear attention's own does not count from one


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    full = _attention_shapes(config)
    for layer in range(config.num_layers):
        attention = _linear_attention_shapes(config, config.linear) if config.is_linear(layer) else full
        mlp = _expert_shapes(config, config.experts) if config.experts and config.has_experts(layer) else _mlp(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in (attention | mlp).items()}
    return shapes | vision_shapes(config)


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    if config.latent is not None:
        return _latent_shapes(config, config.latent)
    hidden, q_size, kv_size = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "post_self_attn_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "post_mlp_layernorm",
    )
    is_whole = FAMILY_FILES[config.architecture].norms_all_heads
    return {
        **{f"{name}.weight": (hidden,) for name in norms},
        "self_attn.q_proj.weight": (q_size * (2 if config.output_gate else 1), hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.qkv_proj.weight": (q_size + 2 * kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_proj.bias": (q_size * (2 if config.output_gate else 1),),
        "self_attn.k_proj.bias": (kv_size,),
        "self_attn.v_proj.bias": (kv_size,),
        "self_attn.o_proj.bias": (hidden,),
        "self_attn.q_norm.weight": (q_size if is_whole else config.head_dim,),
        "self_attn.k_norm.weight": (kv_size if is_whole else config.head_dim,),
        "self_attn.sinks": (config.num_heads,),
    }


def _linear_attention_shapes(config: ModelConfig, linear: LinearAttention | None) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of Qwen3-Next, and of Qwen3.5."""
    assert linear is not None
    hidden, heads, values = config.hidden_size, linear.num_value_heads, linear.values_size
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "linear_attn.in_proj_qkvz.weight": (linear.num_channels + values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * heads, hidden),
        "linear_attn.in_proj_qkv.weight": (linear.num_channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (linear.num_channels, 1, linear.kernel_size),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (linear.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _latent_shapes(config: ModelConfig, latent: LatentAttention) -> dict[str, tuple[int, ...]]:
    hidden, queries = config.hidden_size, config.num_heads * latent.query_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (latent.cached_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.rank,),
        "self_attn.kv_b_proj.weight": (config.num_heads * (latent.plain_dim + latent.value_dim), latent.rank),
        "self_attn.o_proj.weight": (hidden, config.num_heads * latent.value_dim),
    }
    if latent.query_rank is None:
        return {**shapes, "self_attn.q_proj.weight": (queries, hidden)}
    return {
        **shapes,
        "self_attn.q_a_proj.weight": (latent.query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (latent.query_rank,),
        "self_attn.q_b_proj.weight": (queries, latent.query_rank),
    }


def _mlp(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn, experts = config.hidden_size, config.intermediate_size, FAMILY_FILES[config.architecture].experts
    block = experts.dense if experts is not None else "mlp"
    return {
        f"{block}.gate_proj.weight": (ffn, hidden),
        f"{block}.up_proj.weight": (ffn, hidden),
        f"{block}.gate_up_proj.weight": (2 * ffn, hidden),
        f"{block}.down_proj.weight": (hidden, ffn),
    }


def _expert_shapes(config: ModelConfig, experts: Experts) -> dict[str, tuple[int, ...]]:
    names, hidden, shared = (
        FAMILY_FILES[config.architecture].experts,
        config.hidden_size,
        experts.shared_intermediate_size,
    )
    assert names is not None
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.block}.{names.router}.weight": (experts.count, hidden),
        f"{names.block}.{names.router}.bias": (experts.count,),
        f"{names.block}.{names.choice_bias}": (experts.count,),
        f"{names.block}.{names.shared}_gate.weight": (1, hidden),
        f"{names.block}.{names.shared}.gate_proj.weight": (shared, hidden),
        f"{names.block}.{names.shared}.up_proj.weight": (shared, hidden),
        f"{names.block}.{names.shared}.down_proj.weight": (hidden, shared),
    }
    for expert in range(experts.count):
        at = f"{names.block}.experts.{expert}"
        shapes[f"{at}.{names.gate}.weight"] = shapes[f"{at}.{names.up}.weight"] = (experts.intermediate_size, hidden)
        shapes[f"{at}.{names.down}.weight"] = (hidden, experts.intermediate_size)
        if experts.has_biases:
            shapes[f"{at}.{names.gate}.bias"] = shapes[f"{at}.{names.up}.bias"] = (experts.intermediate_size,)
            shapes[f"{at}.{names.down}.bias"] = (hidden,)
    return shapes
