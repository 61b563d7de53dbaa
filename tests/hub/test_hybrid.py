"""Files of Qwen3-Next and Qwen3.5: what config.json says of linear attention, and where their tensors are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import Experts, LinearAttention
from penstock.hub.hf import HFCheckpoint
from penstock.hub.hf_config import model_config
from penstock.model.loading import load_model
from penstock.model.ops.reference import ReferenceOps
from tests.model.paged import PagedDriver
from tests.model.tiny import EXPERTS, LINEAR, SHAPE

# As published (Qwen/Qwen3-Next-80B-A3B-Instruct), but for keys that nobody reads.
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def test_qwen3_next_has_three_linear_layers_for_each_that_attends() -> None:
    config = model_config(QWEN3_NEXT, {}, has_head=True)
    linear_layers = tuple(layer for layer in range(48) if layer % 4 != 3)
    assert config.linear == LinearAttention(linear_layers, 16, 32, 128, 128, 4)
    assert config.experts == Experts(512, 10, 512, normalized=True, shared_intermediate_size=512)
    assert (config.rotary_dim, config.norm_offset, config.output_gate) == (64, 1.0, True)
    assert config.num_parameters / 1e9 == pytest.approx(80, rel=0.01)
    assert config.kv_bytes_per_token(2) == 2 * 12 * 2 * 256 * 2, "twelve layers have keys and values"
    assert config.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"layer_types": ["mamba"] * 48}, ModelUnsupported, "layers of 'mamba'"),
        ({"layer_types": ["full_attention"] * 3}, ModelCorrupt, "names 3 layers of 48"),
        ({"layer_types": ["linear_attention"] * 48}, ModelCorrupt, "all of its layers are of one kind"),
        ({"linear_num_value_heads": 24}, ModelCorrupt, "24 value heads of linear attention cannot share 16"),
        ({"linear_key_head_dim": 0}, ModelCorrupt, "key_dim of its linear attention is 0"),
        ({"linear_conv_kernel_dim": 1}, ModelCorrupt, "kernel of 1"),
    ],
)
def test_linear_attention_that_cannot_be_is_refused(changed: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        model_config(QWEN3_NEXT | changed, {}, has_head=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_stacked", [False, True])
def test_of_a_model_with_images_the_part_that_speaks_is_read(is_stacked: bool, tmp_path: Path) -> None:
    """Experts are tensors of their own, or one of all; drafts of the model's own are not read."""
    torch.manual_seed(0)
    text = SHAPE | EXPERTS | LINEAR | {"num_experts": 5, "shared_expert_intermediate_size": 40}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    theirs = Qwen3_5MoeForConditionalGeneration(config).eval().requires_grad_(False)
    theirs.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights) | {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}
    save_file(stacked(tensors, 5) if is_stacked else tensors, weights)
    checkpoint, ops = HFCheckpoint(tmp_path), ReferenceOps()
    assert checkpoint.config.architecture == "qwen3_5_moe_text"
    assert checkpoint.config.vision is None
    token_ids = list(range(5, 40))
    found = PagedDriver(load_model(checkpoint, ops), ops, block_size=4).prefill(token_ids, 9)
    torch.testing.assert_close(found, theirs(torch.tensor([token_ids])).logits[0], atol=5e-4, rtol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_5_moe"


def stacked(tensors: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{at}.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{at}.gate_up_proj": torch.cat((gate, up), dim=1), f"{at}.down_proj": down}
    return found
