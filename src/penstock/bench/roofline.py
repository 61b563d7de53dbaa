"""What a workload costs at the least, in bytes and operations, and the share of a device's best that a run reached.

Counts only what cannot be avoided: weights once a step, every decode's context, every token's products. It knows
no device but by its measured peaks, and no run but by its seconds and steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.model_config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True)
class EngineWorkload:
    name: str
    lengths: list[tuple[int, int]]  # (prompt, output) tokens of each request
    shared: int = 0  # of each prompt, tokens that all begin with

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lengths)

    @property
    def output_tokens(self) -> int:
        return sum(output for _, output in self.lengths)


@dataclass(frozen=True)
class Device:
    """What a device can do, measured: the roof over every figure."""

    name: str
    read_bytes_per_s: float
    flops_per_s: dict[str, float]  # matrix products of 8192³, by number format


# By the name the driver gives it.
DEVICES = {device.name: device for device in (Device("NVIDIA H200", 4.41e12, {"bfloat16": 765e12, "fp8": 1402e12}),)}


@dataclass(frozen=True)
class Roofline:
    """A model in its number formats, on a device."""

    config: ModelConfig
    dtype: str  # of activations, embedding and head, and of linear weights that are not quantized
    quant: str  # of linear weights: "none", or their number format
    kv_dtype: str
    device: Device

    @property
    def linear_dtype(self) -> str:
        return self.dtype if self.quant == "none" else self.quant

    @property
    def weight_bytes(self) -> int:
        """Read in every step: all but the embedding, of which a step reads a few rows. A tied one is the head too."""
        return BYTES[self.linear_dtype] * self._linear_parameters + BYTES[self.dtype] * self._head_parameters

    def mbu(self, work: EngineWorkload, steps: int, seconds: float) -> float:
        """Bytes that had to be read, over the time, as a share of the device's bandwidth."""
        kv_bytes = self.config.kv_bytes_per_token(BYTES[self.kv_dtype])
        read_bytes = steps * self.weight_bytes + context_read(work) * kv_bytes
        return read_bytes / seconds / self.device.read_bytes_per_s

    def mfu(self, work: EngineWorkload, seconds: float) -> float | None:
        """The time that the products take at the peak of their format, as a share of the run's; None: not measured."""
        peaks = self.device.flops_per_s
        if self.dtype not in peaks or self.linear_dtype not in peaks:
            return None
        queries = query_positions(work)
        num_tokens = sum(end - start for start, end in queries)
        linear_flops = 2 * self._linear_parameters * num_tokens
        head_flops = 2 * self._head_parameters * work.output_tokens
        attended = sum(_sum_of_contexts(start, end) for start, end in queries)
        config = self.config
        attention_flops = 4 * config.num_heads * config.head_dim * config.num_layers * attended
        best_s = linear_flops / peaks[self.linear_dtype] + (head_flops + attention_flops) / peaks[self.dtype]
        return best_s / seconds

    @property
    def _head_parameters(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def _linear_parameters(self) -> int:
        """Norms too: they are few."""
        tables = self._head_parameters * (1 if self.config.tied_embeddings else 2)
        return self.config.num_parameters - tables


def query_positions(work: EngineWorkload) -> list[tuple[int, int]]:
    """[start, end) of the positions computed for each request: shared tokens once, and no last token of an output."""
    first = [0] + [work.shared] * (len(work.lengths) - 1)
    return [(start, prompt + output - 1) for start, (prompt, output) in zip(first, work.lengths, strict=True)]


def context_read(work: EngineWorkload) -> int:
    """Tokens of context that decodes read, all together. What a step's decodes share it reads once."""
    own = sum(
        _sum_of_contexts(prompt, prompt + output - 1) - work.shared * (output - 1) for prompt, output in work.lengths
    )
    return own + work.shared * max(output - 1 for _, output in work.lengths)


def _sum_of_contexts(start: int, end: int) -> int:
    """A token at position p attends to p + 1 tokens: itself and those before it."""
    return (end * (end + 1) - start * (start + 1)) // 2
