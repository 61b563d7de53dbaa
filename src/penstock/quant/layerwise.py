"""A decoder's layer made small, linear by linear in the order in which data meets them: each is fitted to what the
ones before it, already small, hand it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.model.layers import MLP
from penstock.model.ops import Norm
from penstock.model.quantized import Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.quant.inputs import Inputs
from penstock.quant.opened import KeptLinear, OpenLayer, kept
from penstock.quant.walk import Walk


@dataclass(frozen=True)
class Given:
    weight: Tensor  # a linear's, in float32
    inputs: Inputs | None  # None: too little is known of them


@dataclass(frozen=True)
class Fitted:
    weights: Sequence[Weight]
    divisors: Tensor | None = None  # [channels]: what feeds the linears is to be divided by them; None: by nothing


# Linears that are fed by the same; and which channel of what feeds them becomes each of their columns.
Method = Callable[[Sequence[Given], Tensor], Fitted]


def rounded(layer: OpenLayer, quantize: Callable[[Tensor], Weight]) -> None:
    """Every linear by itself, whatever it is given."""
    for site in layer.linears():
        linear = kept(site.linear)
        linear.become(quantize(linear.wide))


def fit_attention(layer: OpenLayer, walk: Walk, method: Method) -> None:
    """The first half of the layer; the walk has passed it."""
    attention, spec = layer.attention, layer.attention.spec
    qkv, output = kept(attention.qkv), kept(attention.output)
    by = fit(qkv, walk.normed(walk.hidden, attention.norm), _channels(walk), method)
    divide_norm(attention.norm, by, walk)

    def attended() -> list[Tensor]:
        return walk.attended((qkv(x) for x in walk.normed(walk.hidden, attention.norm)), attention)

    mixed = attended()
    by = fit(output, mixed, _value_channels(spec.num_heads, spec.num_kv_heads, spec.head_dim), method)
    if by is not None:
        divide_rows(qkv, by, walk.dtype)  # v is its end
        mixed = attended()
    walk.add((output(x) for x in mixed), layer.attention_end)


def fit_mlp(layer: OpenLayer, walk: Walk, method: Method) -> None:
    """The second half of a layer without experts."""
    mlp = layer.mlp
    assert isinstance(mlp, MLP)
    gate_up, down = kept(mlp.gate_up), kept(mlp.down)
    divide_norm(mlp.norm, fit(gate_up, walk.normed(walk.hidden, mlp.norm), _channels(walk), method), walk)

    def gated() -> Iterable[Tensor]:
        return (walk.ops.gated(gate_up(x), layer.activation) for x in walk.normed(walk.hidden, mlp.norm))

    by = fit(down, gated(), torch.arange(down.wide.shape[1]), method)
    if by is not None:
        divide_rows(gate_up, by, walk.dtype)  # up is its end
    walk.add((down(x) for x in gated()), layer.mlp_end)


def fit(linear: KeptLinear, given: Iterable[Tensor], sources: Tensor, method: Method) -> Tensor | None:
    """Fits a linear to its inputs and quantizes it; returns the divisors of what feeds it."""
    inputs = inputs_of(linear, given)
    found = method([Given(linear.wide, inputs)], sources.to(linear.wide.device))
    linear.become(found.weights[0])
    return found.divisors


def inputs_of(linear: KeptLinear, given: Iterable[Tensor]) -> Inputs:
    inputs = Inputs(linear.wide.shape[1], linear.wide.device)
    for rows in given:
        inputs.add(rows)
    return inputs


def divide_norm(norm: Norm, by: Tensor | None, walk: Walk) -> None:
    """Rounded as it will be stored: less what the family adds to it."""
    if by is not None:
        offset = walk.config.norm_offset
        norm.weight.copy_((norm.weight / by - offset).to(walk.dtype).float() + offset)


def divide_rows(linear: KeptLinear, by: Tensor, dtype: torch.dtype) -> None:
    """The last rows: of a weight in groups it is the scales that are divided, so nothing is rounded anew."""
    weight = linear.weight
    assert isinstance(weight, GroupedWeight)
    ones = torch.ones(weight.shape[0] - by.shape[0], device=by.device)
    whole = torch.cat((ones, by))
    if linear.bias is not None:
        linear.bias = (linear.bias / whole).to(dtype).float()
    linear.become(replace(weight, scales=(weight.scales.float() / whole[:, None]).to(weight.scales.dtype)))


def _channels(walk: Walk) -> Tensor:
    return torch.arange(walk.config.hidden_size)


def _value_channels(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Channel of v that each column of the output projection comes from: heads of one group share theirs."""
    kv_head = torch.arange(heads) // (heads // kv_heads)
    return (kv_head[:, None] * head_dim + torch.arange(head_dim)).flatten()
