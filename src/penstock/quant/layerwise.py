"""A decoder's layer made small, linear by linear in the order in which data meets them: each is fitted to what the
ones before it, already small, hand it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.layers import DecoderLayer
from penstock.model.ops import Norm
from penstock.model.quantized import Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.quant.inputs import Inputs
from penstock.quant.walk import KeptLinear, Walk


@dataclass(frozen=True)
class Fitted:
    weight: Weight
    divisors: Tensor | None = None  # [channels]: what feeds the linear is to be divided by them; None: by nothing


# A linear's weight in float32; what it is given; and which channel of what feeds it becomes each of its columns.
Method = Callable[[Tensor, Inputs, Tensor], Fitted]


def rounded(layer: DecoderLayer, quantize: Callable[[Tensor], Weight]) -> DecoderLayer:
    """Every linear by itself, whatever it is given."""

    def small(linear: object) -> KeptLinear:
        assert isinstance(linear, KeptLinear)
        return KeptLinear.of(quantize(linear.wide), linear.bias)

    attention = replace(layer.attention, qkv=small(layer.attention.qkv), output=small(layer.attention.output))
    return DecoderLayer(attention, replace(layer.mlp, gate_up=small(layer.mlp.gate_up), down=small(layer.mlp.down)))


def fitted(layer: DecoderLayer, walk: Walk, method: Method) -> DecoderLayer:
    """The layer, small; the walk has passed it."""
    attention, mlp = layer.attention, layer.mlp
    spec = attention.spec
    channels = torch.arange(walk.config.hidden_size, device=walk.ops.device)

    qkv, by = _fit(attention.qkv, walk.normed(walk.hidden, attention.norm), channels, method)
    norm = _divided_norm(attention.norm, by, walk.dtype)

    def attended() -> list[Tensor]:
        return walk.attended((qkv(x) for x in walk.normed(walk.hidden, norm)), layer)

    mixed = attended()
    values = _value_channels(spec.num_heads, spec.num_kv_heads, spec.head_dim).to(channels.device)
    output, by = _fit(attention.output, mixed, values, method)
    if by is not None:
        qkv = _divided_rows(qkv, by, walk.dtype)  # v is its end
        mixed = attended()
    for hidden, x in zip(walk.hidden, mixed, strict=True):
        hidden += output(x)
    attention = replace(attention, norm=norm, qkv=qkv, output=output)

    gate_up, by = _fit(mlp.gate_up, walk.normed(walk.hidden, mlp.norm), channels, method)
    mlp_norm = _divided_norm(mlp.norm, by, walk.dtype)

    def gated() -> Iterable[Tensor]:
        return (_gated(gate_up(x)) for x in walk.normed(walk.hidden, mlp_norm))

    ups = torch.arange(walk.config.intermediate_size, device=channels.device)
    down, by = _fit(mlp.down, gated(), ups, method)
    if by is not None:
        gate_up = _divided_rows(gate_up, by, walk.dtype)  # up is its end
    for hidden, x in zip(walk.hidden, gated(), strict=True):
        hidden += down(x)
    return DecoderLayer(attention, replace(mlp, norm=mlp_norm, gate_up=gate_up, down=down))


def _fit(linear: object, given: Iterable[Tensor], sources: Tensor, method: Method) -> tuple[KeptLinear, Tensor | None]:
    assert isinstance(linear, KeptLinear)
    inputs = Inputs(linear.wide.shape[1], linear.wide.device)
    for rows in given:
        inputs.add(rows)
    found = method(linear.wide, inputs, sources)
    return KeptLinear.of(found.weight, linear.bias), found.divisors


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _value_channels(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Which channel of v each column of the output projection comes from: heads of one group share theirs."""
    kv_head = torch.arange(heads) // (heads // kv_heads)
    return (kv_head[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _divided_norm(norm: Norm, by: Tensor | None, dtype: torch.dtype) -> Norm:
    return norm if by is None else replace(norm, weight=(norm.weight / by).to(dtype).float())


def _divided_rows(linear: KeptLinear, by: Tensor, dtype: torch.dtype) -> KeptLinear:
    """The last rows: of a weight in groups it is the scales that are divided, so nothing is rounded anew."""
    weight = linear.weight
    assert isinstance(weight, GroupedWeight)
    ones = torch.ones(weight.shape[0] - by.shape[0], device=by.device)
    whole = torch.cat((ones, by))
    scales = (weight.scales.float() / whole[:, None]).to(weight.scales.dtype)
    bias = None if linear.bias is None else (linear.bias / whole).to(dtype).float()
    return KeptLinear.of(replace(weight, scales=scales), bias)
