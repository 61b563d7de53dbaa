"""Tiny random Hugging Face models of every family, and the same weights as one of our checkpoints."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from penstock.core.model_config import ModelConfig, RopeScaling
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.hub.families import FAMILY_FILES
from penstock.hub.hf import HFCheckpoint
from penstock.hub.hf_config import model_config as read_config
from penstock.hub.stored import FloatArray, StoredTensor

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that attention is not uniform and logits differ
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 3}
GEMMA: dict[str, Any] = {"sliding_window": 6, "query_pre_attn_scalar": 40, "head_dim": 24}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
# Both sets of factors are the same: transformers changes from one to the other as a sequence grows.
LONG_ROPE = {
    **PARTIAL_ROPE,
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0],
    "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-3.1": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-biased": LlamaConfig(**SHAPE, attention_bias=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=6),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5),
    "qwen2-moe": Qwen2MoeConfig(
        **(SHAPE | EXPERTS), shared_expert_intermediate_size=40, num_experts=6, mlp_only_layers=[1]
    ),
    "qwen3-moe": Qwen3MoeConfig(**(SHAPE | EXPERTS), num_experts=7, norm_topk_prob=True),
    "gemma2": Gemma2Config(**(SHAPE | GEMMA), attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**(SHAPE | GEMMA), layer_types=["sliding_attention", "full_attention"]),
    "phi3": Phi3Config(**SHAPE, **SPECIAL, sliding_window=6),
    "phi4": Phi3Config(**SHAPE, **SPECIAL, rope_parameters=PARTIAL_ROPE),
    "phi4-long": Phi3Config(**SHAPE, **SPECIAL, rope_parameters=LONG_ROPE, original_max_position_embeddings=16),
    "gpt-oss": GptOssConfig(
        **SHAPE, num_local_experts=6, num_experts_per_tok=3, sliding_window=6, rope_parameters=YARN
    ),
    "qwen3-next": Qwen3NextConfig(**(SHAPE | EXPERTS | LINEAR), num_experts=6, shared_expert_intermediate_size=40),
    "qwen3.5": Qwen3_5TextConfig(**(SHAPE | LINEAR), attention_bias=True),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **(SHAPE | EXPERTS | LINEAR | {"num_hidden_layers": 4, "layer_types": None}),
        num_experts=7,
        shared_expert_intermediate_size=40,
    ),
}


def hf_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):  # norms start at one and biases at zero: make them count
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.3)
    return model


def model_config(hf: PreTrainedConfig) -> ModelConfig:
    if hf.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        return read_config(hf.to_dict(), {}, has_head=True)
    rope = hf.rope_parameters
    window = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    return ModelConfig(
        architecture=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        context_length=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope_scaling(rope),
        tied_embeddings=hf.tie_word_embeddings,
        attention_bias=getattr(hf, "attention_bias", hf.model_type == "qwen2"),
        output_bias=hf.model_type == "llama" and hf.attention_bias,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types) if window else (),
    )


def rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    match rope["rope_type"]:
        case "linear":
            return RopeScaling("linear", rope["factor"])
        case "llama3":
            return RopeScaling(
                "llama3",
                rope["factor"],
                rope["low_freq_factor"],
                rope["high_freq_factor"],
                rope["original_max_position_embeddings"],
            )
    return None


class ArrayCheckpoint:
    """A checkpoint over arrays in memory."""

    def __init__(self, config: ModelConfig, tensors: dict[str, FloatArray]) -> None:
        self._config = config
        self.tensors = tensors

    @property
    def path(self) -> Path:
        return Path("arrays")

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer_source(self) -> TokenizerFiles | TokenizerMetadata:
        raise NotImplementedError

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(self.tensors[name], "F32")

    def tensor(self, name: str) -> FloatArray:
        return self.tensors[name]

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0


class StateDictCheckpoint(ArrayCheckpoint):
    """A checkpoint over a torch model's own weights, named as they are in a file."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, tensors = model_config(model.config), {n: tensor.numpy() for n, tensor in model.state_dict().items()}
        if config.experts is not None:
            names = FAMILY_FILES[config.architecture].experts
            with TemporaryDirectory() as directory:
                model.save_pretrained(directory)
                if names is not None and names.stacked:
                    saved = HFCheckpoint(Path(directory))
                    tensors = {name: saved.tensor(name).copy() for name in saved.tensor_names()}
                else:
                    tensors = load_file(Path(directory) / "model.safetensors")
        super().__init__(config, tensors)
