"""Tiny random Hugging Face models of every family, and the same weights as one of our checkpoints."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
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
    SeedOssConfig,
    SmolLM3Config,
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
LLAMA4: dict[str, Any] = {
    "intermediate_size_mlp": 80,
    "num_local_experts": 5,
    "attention_chunk_size": 8,
    "no_rope_layer_interval": 2,
    "floor_scale": 6,
    "attn_scale": 0.4,
}
MINISTRAL = {**YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
MINISTRAL |= {"original_max_position_embeddings": 16}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.5,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16}
GLM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_YARN = {**YARN, "truncate": True, "mscale": 0.8, "mscale_all_dim": 1.3}
LATENTS: dict[str, Any] = {
    **{name: value for name, value in (SHAPE | EXPERTS).items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 9,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
LATENTS_OF_GLM = {name: value for name, value in LATENTS.items() if name != "first_k_dense_replace"}
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
    "llama4": Llama4TextConfig(**SHAPE, **LLAMA4, rope_parameters=LLAMA3_ROPE),
    "llama4-dense": Llama4TextConfig(
        **(SHAPE | {"num_hidden_layers": 3}), **LLAMA4, interleave_moe_layer_step=2, use_qk_norm=False
    ),
    "granite": GraniteConfig(**SHAPE, **GRANITE, tie_word_embeddings=True),
    "granite-moe": GraniteMoeConfig(**SHAPE, **GRANITE, num_local_experts=5),
    "granite-moe-shared": GraniteMoeSharedConfig(
        **SHAPE, **GRANITE, num_local_experts=5, num_experts_per_tok=3, shared_intermediate_size=40
    ),
    "granite-4": GraniteMoeHybridConfig(
        **SHAPE,
        **GRANITE,
        **MAMBA,
        num_local_experts=0,
        shared_intermediate_size=80,
        layer_types=["full_attention"] * 2,
        position_embedding_type="rope",
    ),
    "granite-4-nope": GraniteMoeHybridConfig(
        **SHAPE, **GRANITE, **MAMBA, num_local_experts=4, layer_types=["full_attention"] * 2
    ),
    "olmo2": Olmo2Config(**SHAPE, **SPECIAL),
    "olmo3": Olmo3Config(
        **(SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 4}),
        **SPECIAL,
        sliding_window=6,
        rope_parameters={
            "full_attention": {**YARN, "truncate": True},  # it looks for this beside the kinds of layers
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "olmoe": OlmoeConfig(**SHAPE, **SPECIAL, num_experts=6, num_experts_per_tok=2),
    "ministral3": Ministral3Config(**SHAPE, rope_parameters=MINISTRAL),
    "smollm3": SmolLM3Config(
        **(SHAPE | {"num_hidden_layers": 3}), **SPECIAL, no_rope_layers=[1, 0, 1], tie_word_embeddings=True
    ),
    "seed-oss": SeedOssConfig(**SHAPE),
    "ernie4.5": Ernie4_5Config(**SHAPE),
    "exaone4": Exaone4Config(**(SHAPE | {"num_hidden_layers": 3}), sliding_window=6, sliding_window_pattern=2),
    "exaone4-small": Exaone4Config(**SHAPE, sliding_window=None, layer_types=["full_attention"] * 2),
    "minimax-m2": MiniMaxM2Config(**SHAPE, num_local_experts=6, num_experts_per_tok=3, rope_parameters=PARTIAL_ROPE),
    "dots1": Dots1Config(
        **(SHAPE | EXPERTS),
        n_routed_experts=6,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        sliding_window=None,
    ),
    "glm": GlmConfig(**SHAPE, **SPECIAL),
    "glm4": Glm4Config(**SHAPE, **SPECIAL),
    "glm4-moe": Glm4MoeConfig(**(SHAPE | EXPERTS), **GLM_EXPERTS, attention_bias=True, use_qk_norm=True),
    "deepseek-v2": DeepseekV2Config(**LATENTS, q_lora_rank=None, n_shared_experts=2),
    "deepseek-v2-groups": DeepseekV2Config(
        **LATENTS,
        q_lora_rank=40,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek-v3": DeepseekV3Config(**LATENTS, q_lora_rank=40, n_group=3, topk_group=2, rope_parameters=DEEPSEEK_YARN),
    "glm-4.7-flash": Glm4MoeLiteConfig(**LATENTS_OF_GLM, q_lora_rank=40, rope_interleave=False),
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
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
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
        names = FAMILY_FILES[config.architecture].experts
        if config.experts is not None or (names is not None and names.stacked):
            with TemporaryDirectory() as directory:
                model.save_pretrained(directory)
                if names is not None and names.stacked:
                    saved = HFCheckpoint(Path(directory))
                    tensors = {name: saved.tensor(name).copy() for name in saved.tensor_names()}
                else:
                    tensors = load_file(Path(directory) / "model.safetensors")
        super().__init__(config, tensors)
