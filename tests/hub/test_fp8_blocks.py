"""FP8 weights with a scale for each block, as DeepSeek-V3 is published: what is read of them, whole and in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config

from penstock.core.errors import ModelUnsupported
from penstock.hub.hf import HFCheckpoint
from penstock.hub.stored import Part
from tests.hub.families import random_model
from tests.hub.fp8_checkpoints import edit_config, edit_tensor, weights_file

ROWS, COLUMNS = 48, 40  # of a block: sizes are no multiples of it
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [ROWS, COLUMNS],
}
CONFIG = DeepseekV3Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=24,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    max_position_embeddings=64,
)
UP = "model.layers.0.mlp.up_proj.weight"


def write_blocks(directory: Path) -> dict[str, Tensor]:
    """The weights that a reader must find, in float32."""
    random_model(CONFIG).to(torch.bfloat16).save_pretrained(directory)
    stored, expected = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(weights_file(directory)).items():
        if not name.endswith("_proj.weight"):
            stored[name], expected[name] = weight, weight.float()
            continue
        shape = -(-weight.shape[0] // ROWS), -(-weight.shape[1] // COLUMNS)
        scales = torch.rand(shape) * 1e-3 + 1e-4
        wide = scales.repeat_interleave(ROWS, 0).repeat_interleave(COLUMNS, 1)[: weight.shape[0], : weight.shape[1]]
        stored[name] = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        expected[name] = (stored[name].float() * wide).bfloat16().float()
    save_file(stored, weights_file(directory))
    edit_config(directory, quantization_config=QUANTIZATION)
    return expected


def test_weights_are_dequantized_by_their_blocks(tmp_path: Path) -> None:
    expected = write_blocks(tmp_path)
    checkpoint = HFCheckpoint(tmp_path)
    assert checkpoint.config.quantization is None
    for name, weight in expected.items():
        assert torch.equal(torch.from_numpy(checkpoint.tensor(name).copy()), weight), name


@pytest.mark.parametrize(
    ("rows", "columns"), [(slice(0, 96), None), (slice(30, 70), None), (slice(0, 96), slice(8, 61))]
)
def test_a_part_of_a_weight_is_that_part_of_the_whole(tmp_path: Path, rows: slice, columns: slice | None) -> None:
    whole = write_blocks(tmp_path)[UP]
    found = HFCheckpoint(tmp_path).stored_part(UP, Part((96, 64), rows, columns)).widened()
    assert torch.equal(torch.from_numpy(found), whole[rows] if columns is None else whole[rows, columns])


@pytest.mark.parametrize(
    ("scales", "reason"),
    [(None, "without .*up_proj.weight_scale_inv"), (torch.ones(3, 2), r"up_proj.weight_scale_inv of shape \[3, 2\]")],
)
def test_scales_that_are_not_there_or_of_other_blocks_are_refused(
    scales: Tensor | None, reason: str, tmp_path: Path
) -> None:
    write_blocks(tmp_path)
    edit_tensor(tmp_path, f"{UP}_scale_inv", scales)
    with pytest.raises(ModelUnsupported, match=reason):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("size", [[128], "128", [128, 0]])
def test_block_sizes_that_are_none_are_refused(size: object, tmp_path: Path) -> None:
    write_blocks(tmp_path)
    edit_config(tmp_path, quantization_config=QUANTIZATION | {"weight_block_size": size})
    with pytest.raises(ModelUnsupported, match="weight_block_size"):
        HFCheckpoint(tmp_path)
