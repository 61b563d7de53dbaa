"""Tiny random gpt-oss directories with experts in MXFP4, and transformers' model of what it dequantizes them to."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.model.tiny import SHAPE, YARN

EXPERTS = 5
GPT_OSS = GptOssConfig(
    **(SHAPE | {"intermediate_size": 128}),
    num_local_experts=EXPERTS,
    num_experts_per_tok=3,
    sliding_window=6,
    rope_parameters=YARN,
)
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_mxfp4(directory: Path, config: GptOssConfig = GPT_OSS) -> PreTrainedModel:
    """Any bytes are numbers; scales differ by up to 64 times from group to group."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.3)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer in range(config.num_hidden_layers):
        for name in ("gate_up_proj", "down_proj"):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            experts, inputs, outputs = tensors.pop(at).shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, blocks.shape[:3], dtype=torch.uint8)
            tensors |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
            model.get_parameter(at).copy_(dequantized(blocks, scales))
    save_file(tensors, path)
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | {"quantization_config": QUANTIZATION}))
    return model


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the weights by transformers: [experts, in, out]"""
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
