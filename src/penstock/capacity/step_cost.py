"""How long a step takes: a roofline with four constants, the same for every model, format and GPU.

    step = layers x overhead                     what launching a layer's kernels costs, whatever is in the step
         + max(weights read, products computed)  linear layers are bound by the one or the other; of a mixture the
                                                 experts that the step's tokens are expected to be given
         + attention of prompts, computed        by pairs of tokens
         + context of decodes, read              from the KV cache
         + decodes x overhead                    what the host does for each sequence: schedule, sample, hand out
         + all-reduces, hand-over between stages only on several GPUs

It knows no scheduler and no request: a step is four numbers. See docs/plan.md for how the constants were fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.capacity.formats import BYTES, Formats, compute_format
from penstock.capacity.hardware import Gpu
from penstock.capacity.model_bytes import ModelBytes, experts_read
from penstock.core.model_config import ModelConfig


@dataclass(frozen=True)
class Constants:
    """How much of a datasheet a serving engine gets. All that is fitted."""

    bandwidth_efficiency: float  # of memory bandwidth, for weights and KV cache
    flops_efficiency: float  # of the peak for dense products, for linear layers and attention
    layer_overhead_s: float  # per layer and step: launches, norms, and the gaps between kernels
    sequence_overhead_s: float  # per sequence that decodes and step


# Fitted by `python -m tools.roofline` to what was measured on one H200: 19 cells each, none more than 16 % off.
VLLM = Constants(bandwidth_efficiency=0.91, flops_efficiency=0.60, layer_overhead_s=62e-6, sequence_overhead_s=12e-6)
PENSTOCK = Constants(
    bandwidth_efficiency=0.89, flops_efficiency=0.55, layer_overhead_s=22e-6, sequence_overhead_s=2.3e-6
)
ENGINES = {"vllm": VLLM, "penstock": PENSTOCK}


@dataclass(frozen=True)
class Parallelism:
    """How many GPUs one replica is spread over."""

    tensor: int = 1  # every layer over so many: each reads its share of the weights; two all-reduces a layer
    pipeline: int = 1  # so many stages, each with its share of the layers: room for weights, not speed for one token

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP{self.tensor}" + (f" PP{self.pipeline}" if self.pipeline > 1 else "")


class StepCost:
    """Coefficients are made once, so that a step costs a few multiplications.

    With a pipeline a step is one micro-batch's way through all stages; as many others are under way in the meantime.
    """

    __slots__ = (
        "experts",
        "experts_s",
        "fixed_s",
        "head_token_s",
        "kv_token_s",
        "linear_token_s",
        "pair_s",
        "read_s",
        "sequence_s",
        "token_s",
    )

    def __init__(
        self,
        config: ModelConfig,
        gpu: Gpu,
        constants: Constants = VLLM,
        *,
        formats: Formats = Formats(),  # noqa: B008 (frozen)
        parallelism: Parallelism = Parallelism(),  # noqa: B008 (frozen)
    ) -> None:
        model, tensor, stages = ModelBytes(config, formats), parallelism.tensor, parallelism.pipeline
        bytes_per_s = gpu.bytes_per_s * constants.bandwidth_efficiency
        products = compute_format(formats.weights, formats.dtype, frozenset(gpu.tflops))
        linear_flops_per_s = gpu.flops_per_s(products) * constants.flops_efficiency * tensor
        other_flops_per_s = gpu.flops_per_s(formats.dtype) * constants.flops_efficiency * tensor
        self.read_s = model.read_bytes / tensor / bytes_per_s
        self.experts = config.experts
        self.experts_s = model.expert_bytes / tensor / bytes_per_s  # of `read_s`, all experts' part
        self.linear_token_s = model.linear_flops_per_token / linear_flops_per_s
        self.head_token_s = model.head_flops_per_token / other_flops_per_s
        self.pair_s = model.flops_per_pair / other_flops_per_s
        # Heads of keys and values that are fewer than the GPUs are held more than once.
        self.kv_token_s = model.kv_bytes_per_token / min(tensor, config.num_kv_heads) / bytes_per_s
        self.sequence_s = constants.sequence_overhead_s
        token_bytes = config.hidden_size * BYTES[formats.dtype]
        reduce_bytes = 2 * (tensor - 1) / tensor * token_bytes * 2 * config.num_layers
        link_per_s, network_per_s = (
            each * 1e9 * constants.bandwidth_efficiency for each in (gpu.link_gb_s, gpu.network_gb_s)
        )
        self.token_s = reduce_bytes / link_per_s + (stages - 1) * token_bytes / tensor / network_per_s
        num_reduces = 2 * config.num_layers if tensor > 1 else 0
        self.fixed_s = (
            config.num_layers * constants.layer_overhead_s + (num_reduces + stages - 1) * gpu.link_latency_us * 1e-6
        )

    def seconds(self, prefill_tokens: float, prefill_pairs: float, num_decodes: float, decode_context: float) -> float:
        """`prefill_pairs`: tokens of context that the prompts' tokens look at, all together (`model_bytes.pairs`).

        `decode_context`: tokens of context that the decodes read, all together.
        """
        tokens = prefill_tokens + num_decodes
        products_s = tokens * self.linear_token_s + num_decodes * self.head_token_s
        read_s = self.read_s
        if self.experts is not None:
            read_s -= self.experts_s * (1.0 - experts_read(self.experts, tokens))
        return (
            self.fixed_s
            + (products_s if products_s > read_s else read_s)
            + prefill_pairs * self.pair_s
            + decode_context * self.kv_token_s
            + num_decodes * self.sequence_s
            + tokens * self.token_s
        )
