"""The least that a workload costs, in bytes and operations, and the share of a device's best that a run reached.

Counts only what cannot be avoided: weights once a step, every decode's context, every token's products. It knows
no device but by its measured peaks, and no run but by its seconds and steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.capacity.formats import Formats
from penstock.capacity.hardware import Peaks
from penstock.capacity.model_bytes import ModelBytes, pairs
from penstock.core.model_config import ModelConfig


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
class Roofline:
    """A model in its number formats, on a device."""

    config: ModelConfig
    dtype: str  # of activations, embedding and head, and of linear weights that are not quantized
    quant: str  # of linear weights: "none", or their number format
    kv_dtype: str
    peaks: Peaks  # of the device, measured

    @property
    def linear_dtype(self) -> str:
        return self.dtype if self.quant == "none" else self.quant

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that every step reads."""
        return self._bytes.read_bytes

    def mbu(self, work: EngineWorkload, steps: int, seconds: float) -> float:
        """Bytes that had to be read, over the time, as a share of the device's bandwidth."""
        tokens = sum(end - start for start, end in query_positions(work))
        weight_bytes = self._bytes.read_bytes_of(tokens / steps) if steps else 0.0
        read_bytes = steps * weight_bytes + context_read(work) * self._bytes.kv_bytes_per_token
        return read_bytes / seconds / self.peaks.bytes_per_s

    def mfu(self, work: EngineWorkload, seconds: float) -> float | None:
        """The time that the products take at the peak of their format, as a share of the run's; None: not measured."""
        peaks = self.peaks.flops_per_s
        if self.dtype not in peaks or self.linear_dtype not in peaks:
            return None
        queries, model = query_positions(work), self._bytes
        linear_flops = model.linear_flops_per_token * sum(end - start for start, end in queries)
        head_flops = model.head_flops_per_token * work.output_tokens
        attention_flops = model.flops_per_pair * sum(pairs(start, end) for start, end in queries)
        best_s = linear_flops / peaks[self.linear_dtype] + (head_flops + attention_flops) / peaks[self.dtype]
        return best_s / seconds

    @property
    def _bytes(self) -> ModelBytes:
        return ModelBytes(self.config, Formats(self.linear_dtype, self.kv_dtype, self.dtype))


def query_positions(work: EngineWorkload) -> list[tuple[int, int]]:
    """[start, end) of the positions computed for each request: shared tokens once, and no last token of an output."""
    first = [0] + [work.shared] * (len(work.lengths) - 1)
    return [(start, prompt + output - 1) for start, (prompt, output) in zip(first, work.lengths, strict=True)]


def context_read(work: EngineWorkload) -> int:
    """Tokens of context that decodes read, all together. What a step's decodes share it reads once."""
    own = sum(pairs(prompt, prompt + output - 1) - work.shared * (output - 1) for prompt, output in work.lengths)
    return own + work.shared * max(output - 1 for _, output in work.lengths)
