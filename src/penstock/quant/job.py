"""Quantization of a checkpoint into a directory: layer by layer, each written as soon as it is made.

A run that goes on reads the layers that are there and passes the data through them: what it writes is what the first
run would have written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.hub.checkpoint import Checkpoint
from penstock.hub.hf_vision import ENCODER
from penstock.hub.quantized_directory import QuantizedDirectory, ShardFile
from penstock.hub.safetensors_file import CODES, Written
from penstock.model.sparse import SparseMLP
from penstock.quant.layerwise import fit_attention, fit_mlp, rounded
from penstock.quant.mixture import fit_experts
from penstock.quant.opened import OpenLayer, kept
from penstock.quant.recipe import Recipe
from penstock.quant.walk import Walk

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
                made = ShardFile.of(shard, checkpoint.config, recipe.config(checkpoint.config))
                walk.advance(walk.layer(index, made))
            continue
        layer = walk.layer(index)
        starved: list[str] = []
        if recipe.needs_data:
            starved = fitted(layer, walk, recipe)
        else:
            rounded(layer, recipe.nearest)
        directory.write(index, layer_tensors(layer, checkpoint, recipe), starved)
    if not directory.shard(num_layers).exists():
        directory.write(num_layers, _other_tensors(checkpoint, recipe))
    progress(num_layers, num_layers)


def fitted(layer: OpenLayer, walk: Walk, recipe: Recipe) -> list[str]:
    """The layer, small, and passed by the walk; and who of its experts was given too few rows."""
    fit_attention(layer, walk, recipe.fit)
    if isinstance(layer.mlp, SparseMLP):
        return fit_experts(layer, walk, recipe.fit)
    fit_mlp(layer, walk, recipe.fit)
    return []


def layer_tensors(layer: OpenLayer, checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Written]:
    """All of the layer that a file has, by name."""
    code, offset = CODES[recipe.dtype], checkpoint.config.norm_offset
    found = {name: _plain(norm.weight - offset, code) for name, norm in layer.norms.items()}
    found |= {name: _plain(router.wide, code) for name, router in layer.routers.items()}
    made = set(found)
    for site in layer.linears():
        linear = kept(site.linear)
        assert not isinstance(linear.weight, Tensor)
        places = torch.arange(linear.wide.shape[0]) if site.order is None else site.order.argsort()
        for name, rows in zip(site.outputs, torch.split(places, list(site.outputs.values())), strict=True):
            rows = rows.to(linear.wide.device)
            found |= recipe.tensors(f"{name}.weight", linear.weight.rows(rows))
            made.add(f"{name}.weight")
            if linear.bias is not None:
                found[f"{name}.bias"] = _plain(linear.bias[rows], code)
    others = {name for name in checkpoint.tensor_names() if name.startswith(layer.prefix)} - made - found.keys()
    return found | {name: Written(checkpoint.tensor(name), code) for name in sorted(others)}


def _other_tensors(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Written]:
    """Embedding, last norm and head: as they are, in 16 bits."""
    names = {name for name in checkpoint.tensor_names() if not name.startswith(("model.layers.", *ENCODER))}
    if checkpoint.config.tied_embeddings:
        names.discard("lm_head.weight")
    return {name: Written(checkpoint.tensor(name), CODES[recipe.dtype]) for name in sorted(names)}


def _plain(tensor: Tensor, code: str) -> Written:
    return Written(tensor.float().cpu().numpy(), code)
