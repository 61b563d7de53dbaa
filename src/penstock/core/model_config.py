"""The shape of a decoder-only transformer, whatever file it came from. No torch, no file formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Rotary embeddings stretched beyond the length they were trained for."""

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3
    factors: tuple[float, ...] = ()  # GGUF's form: what each frequency is divided by


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # the family's name: "llama", "qwen2", "qwen3", "mistral"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k and v (Qwen2)
    output_bias: bool = False  # bias on the attention's output projection too
    windows: tuple[int | None, ...] = ()  # per layer: how many tokens back it sees; empty: all of them
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # Of most of the linear layers' weights, where the file has them smaller: see `EngineSettings.quant`.
    quantization: Literal["fp8", "int8", "int4", "w8a8"] | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        per_layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * per_layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value
