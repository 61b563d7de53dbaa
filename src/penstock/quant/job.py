"""From a checkpoint to a directory with a quantized one: layer by layer, each written as soon as it is made.

A run that goes on reads the layers that are there and passes the data through them: what it writes is what the first
run would have written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.hub.checkpoint import Checkpoint
from penstock.hub.quantized_directory import QuantizedDirectory, Shard
from penstock.hub.safetensors_file import CODES, Written
from penstock.model.layers import DecoderLayer
from penstock.quant.layerwise import fitted, rounded
from penstock.quant.recipe import Recipe
from penstock.quant.walk import KeptLinear, Walk

Progress = Callable[[int, int], None]  # (layers done, layers in all)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@torch.no_grad()
def quantize(
    checkpoint: Checkpoint,
    recipe: Recipe,
    directory: QuantizedDirectory,
    token_ids: Tensor | None,
    device: torch.device,
    progress: Progress,
) -> None:
    """All weights; `token_ids` [windows, length] is the data to fit them to, where the recipe needs any."""
    if token_ids is None:
        assert not recipe.needs_data
        token_ids = torch.zeros(1, 1, dtype=torch.int64)
    walk = Walk(checkpoint, token_ids, device, dtype=DTYPES[recipe.dtype])
    num_layers = checkpoint.config.num_layers
    for index in range(num_layers):
        progress(index, num_layers)
        shard = directory.shard(index)
        if shard.exists():
            if recipe.needs_data:
                walk.advance(walk.layer(index, Shard.of(shard, checkpoint.config, recipe.config())))
            continue
        layer = walk.layer(index)
        small = fitted(layer, walk, recipe.fit) if recipe.needs_data else rounded(layer, recipe.nearest)
        directory.write(index, layer_tensors(small, index, checkpoint, recipe))
    if not directory.shard(num_layers).exists():
        directory.write(num_layers, _other_tensors(checkpoint, recipe))
    progress(num_layers, num_layers)


def layer_tensors(layer: DecoderLayer, index: int, checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Written]:
    """All of the layer that a file has, by name."""
    prefix, config = f"model.layers.{index}.", checkpoint.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    joined = {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): (layer.attention.qkv, [queries, keys, keys]),
        ("self_attn.o_proj",): (layer.attention.output, [config.hidden_size]),
        ("mlp.gate_proj", "mlp.up_proj"): (layer.mlp.gate_up, [config.intermediate_size] * 2),
        ("mlp.down_proj",): (layer.mlp.down, [config.hidden_size]),
    }
    code = CODES[recipe.dtype]
    found = {
        f"{prefix}input_layernorm.weight": _plain(layer.attention.norm.weight, code),
        f"{prefix}post_attention_layernorm.weight": _plain(layer.mlp.norm.weight, code),
    }
    made = set(found)
    for names, (linear, sizes) in joined.items():
        assert isinstance(linear, KeptLinear)
        assert not isinstance(linear.weight, Tensor)
        for name, rows in zip(names, torch.split(torch.arange(linear.wide.shape[0]), sizes), strict=True):
            rows = rows.to(linear.wide.device)
            found |= recipe.tensors(f"{prefix}{name}.weight", linear.weight.rows(rows))
            made.add(f"{prefix}{name}.weight")
            if linear.bias is not None:
                found[f"{prefix}{name}.bias"] = _plain(linear.bias[rows], code)
    others = {name for name in checkpoint.tensor_names() if name.startswith(prefix)} - made - found.keys()
    return found | {name: Written(checkpoint.tensor(name), code) for name in others}


def _other_tensors(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Written]:
    """Embedding, last norm and head: as they are, in 16 bits."""
    names = {name for name in checkpoint.tensor_names() if not name.startswith("model.layers.")}
    if checkpoint.config.tied_embeddings:
        names.discard("lm_head.weight")
    return {name: Written(checkpoint.tensor(name), CODES[recipe.dtype]) for name in sorted(names)}


def _plain(tensor: Tensor, code: str) -> Written:
    return Written(tensor.float().cpu().numpy(), code)
