"""Tiny random models of every family, from transformers, and GGUF files written from them the way llama.cpp does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.hub.gguf_random import random_blocks

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, max_position_embeddings=256, head_dim=32, sliding_window=16),
    "qwen2": Qwen2Config(**SHAPE, max_position_embeddings=256, rope_theta=1e6, eos_token_id=[5, 7]),
    "qwen3": Qwen3Config(**SHAPE, max_position_embeddings=256, head_dim=32, bos_token_id=3, eos_token_id=5),
}
IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_LEVEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def random_model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))  # it writes into its config
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which would all be 1 and 0
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tensors_of(model: Any) -> Tensors:
    tensors = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_LEVEL:
        return f"{TOP_LEVEL[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{IN_BLOCK[part]}.{suffix}"


def interleave(rows: Any, num_heads: int) -> Any:
    """Does to the q and k rows of a llama what llama.cpp's converter does."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, config: PreTrainedConfig, tensors: Tensors, quantization: str = "F32", **metadata: float | str
) -> Path:
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type in ("mistral", "qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}é" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for key, value in metadata.items():
        key = key.replace("__", ".")
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)  # type: ignore[operator]
    for name, values in tensors.items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = interleave(values, heads)
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else quantization]
        if kind.name.endswith("_K"):  # which gguf's Python cannot write
            stored = random_blocks(kind, *values.shape, seed=len(name)).reshape(values.shape[0], -1)
        else:
            stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(name if name == "rope_freqs.weight" else gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
