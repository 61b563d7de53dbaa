"""The operations a transformer is made of, as one small interface with an implementation per device.

`reference` is plain torch and runs anywhere; `native` is C for the CPU. All of one interface, held equal by tests.
Activations are [tokens, features]. A layer makes five calls: norm and
qkv, attention, output, norm and gate_up, SwiGLU and down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.model.batch import Batch


@dataclass(frozen=True)
class KVShape:
    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerKV:
    """One layer's part of the cache. The layout is the implementation's own affair."""

    keys: Tensor
    values: Tensor
    block_size: int


@dataclass(frozen=True)
class Rope:
    """Rotary tables: angles of every position, in the half-rotation layout of Hugging Face."""

    cos: Tensor  # [context, head_dim / 2] float32
    sin: Tensor  # [context, head_dim / 2] float32


@dataclass(frozen=True)
class AttentionSpec:
    """What is constant about one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a token sees itself and window - 1 tokens before it; None: all
    q_norm: Tensor | None = None  # [head_dim]: RMSNorm of each head before the rotation (Qwen3)
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class Fp8Weight:
    """A weight in 8-bit floating point, as a checkpoint stores it: values * scales[:, None]."""

    values: Tensor  # [out, in] float8_e4m3fn
    scales: Tensor  # [out] float32
    input_scale: float | None = None  # activations are divided by it; None: each row by what its largest needs

    def dequantized(self) -> Tensor:
        return self.values.float() * self.scales[:, None]


def plain(weight: Tensor | Fp8Weight) -> Tensor:
    """For operations that know no such format."""
    return weight.dequantized() if isinstance(weight, Fp8Weight) else weight


class Linear(Protocol):
    """A weight that knows its own format. Built once by `Ops.linear`, called every step."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Ops(Protocol):
    device: torch.device
    weight_dtype: torch.dtype  # how linear weights are stored, unless they are quantized
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype

    def linear(self, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Linear:
        """Pack a [out, in] weight of any float type for this device. The caller drops its own copy."""

    def embedding(self, table: Tensor) -> Linear:
        """A lookup [tokens] int32 -> [tokens, hidden] from a float32 [vocab, hidden] table."""

    def tied(self, table: Tensor) -> tuple[Linear, Linear]:
        """(embedding, head) from one table, stored once where the implementation can."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; the norm of the sum is returned."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * ffn], gate first -> silu(gate) * up, [tokens, ffn]"""

    def norm_linear(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, linear: Linear) -> Tensor:
        """linear(add_rms_norm(x, residual, weight, eps)): together, since what the linear reads may not be what a
        norm writes."""

    def silu_linear(self, gate_up: Tensor, linear: Linear) -> Tensor:
        """linear(silu_mul(gate_up))"""

    def allocate_kv(self, shape: KVShape) -> list[LayerKV]:
        """Zeroed lazily by the operating system where possible: untouched blocks cost no memory."""

    def begin(self, batch: Batch) -> None:
        """A step of all layers begins: prepare what they share. A captured graph must hold it."""

    def attention(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> Tensor:
        """Rotate q and k, write k and v into the cache, attend causally over each sequence's blocks.

        qkv is [tokens, (num_heads + 2 * num_kv_heads) * head_dim], q first, then k, then v.
        Returns [tokens, num_heads * head_dim].
        """

    def copy_blocks(self, kv: list[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer: the copy of copy-on-write."""
