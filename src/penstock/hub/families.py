"""How the files of each family look: what the formats call it, and what they leave unsaid. A family is one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class FamilyFiles:
    hf_class: str  # what config.json calls the model's class
    hf_defaults: Mapping[str, Any]  # what transformers takes for a key that config.json does not have
    # Biases of the attention: on all four projections if the config says so; on q, k and v without its saying so.
    biases: Literal["as configured", "on qkv", "never"]
    # Sliding windows: on every layer that has a window configured, or on the layers that the config lists.
    windows: Literal["never", "on all layers", "on some layers"]
    has_gguf_name: bool = True
    gguf_rotates_neighbours: bool = False  # llama.cpp's rotation of q and k; the others' files are as Hugging Face's


FAMILY_FILES: dict[str, FamilyFiles] = {
    "llama": FamilyFiles(
        "LlamaForCausalLM", {"max_position_embeddings": 2048}, "as configured", "never", gguf_rotates_neighbours=True
    ),
    "mistral": FamilyFiles(  # in GGUF a llama with a window
        "MistralForCausalLM",
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        "never",
        "on all layers",
        has_gguf_name=False,
    ),
    "qwen2": FamilyFiles(
        "Qwen2ForCausalLM",
        {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
        "on qkv",
        "on some layers",
    ),
    "qwen3": FamilyFiles(
        "Qwen3ForCausalLM",
        {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        "as configured",
        "on some layers",
    ),
}
