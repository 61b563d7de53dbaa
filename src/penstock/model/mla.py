"""Multi-head latent attention (MLA), as DeepSeek has it: all heads' keys and values are made of one small latent.

The cache holds a token's latent and the rotated key that all heads share: one head of keys, whose first part is the
value too. The weights from latents to keys (W_UK) are absorbed into the queries, those to values (W_UV) into the
output, so that attention is over latents: a head's query is as wide as what is cached, and so is what it finds. Prompts
are attended in this form too: it computes more than keys and values that are made of the whole context would, and needs
no memory for those, whatever is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import LatentAttention, ModelConfig
from penstock.model.batch import Batch
from penstock.model.layers import attention_spec, load_norm
from penstock.model.ops import AttentionSpec, LayerKV, Linear, Norm, Ops, Rope, Stream
from penstock.model.quantized import Weight, plain
from penstock.model.shard import Axis, Split
from penstock.model.weights import Outputs, Weights

NORM_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


@dataclass(frozen=True, slots=True)
class LatentAttentionLayer:
    ops: Ops
    shape: LatentAttention
    norm: Norm
    down: Linear  # the stream to the query's vector, if there is one, the latent and the shared key
    query_norm: Norm | None  # None: queries are made of the stream
    query: Linear
    latent_norm: Norm
    key_up: Linear  # for each head: turns the unrotated part of a query into a query of latents
    value_up: Linear  # for each head: turns a sum of latents into a sum of values
    output: Linear
    spec: AttentionSpec
    rope: Rope

    @classmethod
    def load(cls, layer: Weights, rope: Rope, index: int) -> LatentAttentionLayer:
        config, weights = layer.config, layer.at("self_attn")
        shape, hidden = config.latent, config.hidden_size
        assert shape is not None, "its config says so"
        if layer.shard.sp > 1:
            raise ModelUnsupported("ranks cannot share out the tokens of a model with latent attention (MLA): leave sp")
        query_rank, spec = shape.query_rank, attention_spec(layer, index)
        end = _in_halves(shape)
        cached = torch.cat((torch.arange(shape.rank), shape.rank + end))
        down = {"kv_a_proj_with_mqa": shape.cached_dim}
        if query_rank is not None:
            down, cached = {"q_a_proj": query_rank, **down}, torch.cat((torch.arange(query_rank), query_rank + cached))
        query_name = "q_proj" if query_rank is None else "q_b_proj"
        heads = torch.cat((torch.arange(shape.plain_dim), shape.plain_dim + end))
        order = (torch.arange(spec.num_heads)[:, None] * shape.query_dim + heads).flatten()
        key_up, value_up = _absorbed(weights, config, spec.num_heads)
        return cls(
            ops=layer.ops,
            shape=shape,
            norm=load_norm(layer, "input_layernorm"),
            down=_ordered(weights, down, hidden, Split.NONE, cached),
            query_norm=None if query_rank is None else _norm(weights, "q_a_layernorm", query_rank),
            query=_ordered(
                weights,
                {query_name: head_axis(config, shape.query_dim)},
                hidden if query_rank is None else query_rank,
                Split.COLUMNS,
                order,
            ),
            latent_norm=_norm(weights, "kv_a_layernorm", shape.rank),
            key_up=layer.ops.head_linears(key_up),
            value_up=layer.ops.head_linears(value_up),
            output=weights.linear(
                {"o_proj": hidden},
                head_axis(config, shape.value_dim),
                split=Split.ROWS,
                precise=weights.is_end_layer,
            ),
            spec=spec,
            rope=rope,
        )

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        shape, ops = self.shape, self.ops
        x = ops.normed(stream, self.norm)
        made = self.down(x)
        if self.query_norm is not None:
            vector, made = made.split_with_sizes([made.shape[1] - shape.cached_dim, shape.cached_dim], dim=1)
            x = ops.normed(Stream(vector.contiguous()), self.query_norm)
        queries = self.query(x).view(len(x), self.spec.num_heads, shape.query_dim)
        latent, key = made.split_with_sizes([shape.rank, shape.rotary_dim], dim=1)
        latent = ops.normed(Stream(latent.contiguous()), self.latent_norm)
        still, turning = queries.split_with_sizes([shape.plain_dim, shape.rotary_dim], dim=2)
        absorbed = torch.cat((self.key_up(still), turning), dim=2).flatten(1)  # [tokens, heads * cached_dim]
        found = ops.attention(torch.cat((absorbed, latent, key), dim=1), self.spec, self.rope, kv, batch)
        values = self.value_up(found.view(len(x), self.spec.num_heads, shape.rank))
        ops.add_linear(stream, values.reshape(len(x), -1), self.output)


def head_axis(config: ModelConfig, width: int) -> Axis:
    """Numbers of each head of queries; as `layers.query_heads`, whose heads share one of keys."""
    return Axis(config.num_heads * width, width, are_heads=True)


def _norm(weights: Weights, path: str, size: int) -> Norm:
    return Norm(weights.norm(f"{path}.weight", size), NORM_EPS)


def _in_halves(shape: LatentAttention) -> Tensor:
    """Order of the rotated dimensions in which those that are rotated together are half of them apart."""
    order = torch.arange(shape.rotary_dim)
    return torch.cat((order[0::2], order[1::2])) if shape.interleaved else order


def _ordered(weights: Weights, outputs: Outputs, inputs: int, split: Split, order: Tensor) -> Linear:
    """A linear whose outputs lie in another order than in the files."""
    weight = weights.weight(outputs, inputs, split=split)
    linear = weights.ops.linear(_rows(weight, order))
    weights.note(linear, outputs, inputs, split=split, order=order)
    return linear


def _rows(weight: Weight, order: Tensor) -> Weight:
    return weight[order.to(weight.device)] if isinstance(weight, Tensor) else weight.rows(order)


def _absorbed(weights: Weights, config: ModelConfig, num_heads: int) -> tuple[Tensor, Tensor]:
    """Weights of this rank's heads that turn a query into one of latents [heads, rank, plain], and latents into values
    [heads, value, rank]. Neither is quantized here: the first is used transposed."""
    shape = config.latent
    assert shape is not None
    axis = head_axis(config, shape.plain_dim + shape.value_dim)
    both = plain(weights.stored_weight({"kv_b_proj": axis}, shape.rank, split=Split.COLUMNS))
    keys, values = both.view(num_heads, -1, shape.rank).split_with_sizes([shape.plain_dim, shape.value_dim], dim=1)
    return keys.transpose(1, 2).contiguous(), values.contiguous()
