"""How long a step takes: a roofline with four constants, the same for every model, format and GPU.

    step = layers x overhead                     what launching a layer's kernels costs, whatever is in the step
         + max(weights read, products computed)  linear layers are bound by the one or the other; of a mixture the
                                                 experts that the step's tokens are expected to be given
         + attention of prompts, computed        by pairs of tokens
         + context of decodes, read              from the KV cache
         + decodes x overhead                    what the host does for each sequence: schedule, sample, hand out
         + communication                         only on several GPUs: see `communication_s`

It knows no scheduler and no request: a step is four numbers. See docs/plan.md for how the constants were fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.capacity.formats import BYTES, Formats, compute_format
from penstock.capacity.hardware import Gpu
from penstock.capacity.model_bytes import ModelBytes, experts_read
from penstock.capacity.rank_share import rank_config
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism


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


class StepCost:
    """Coefficients are made once, so that a step costs a few multiplications.

    Of several ranks the largest one's part counts: the others wait for it. With a pipeline a step is one micro-batch's
    way through all stages; as many others are under way in the meantime.
    """

    __slots__ = (
        "experts",
        "experts_s",
        "fixed_s",
        "head_token_s",
        "kv_token_s",
        "linear_token_s",
        "logits_s",
        "pair_s",
        "read_s",
        "sequence_s",
        "sync_s",
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
        rank = ModelBytes(rank_config(config, parallelism), formats)
        # Experts that are shared out whole are as much work as experts that are cut, if each is chosen as often.
        even = ModelBytes(rank_config(config, replace(parallelism, ep=1)), formats)
        bytes_per_s = gpu.bytes_per_s * constants.bandwidth_efficiency
        products = compute_format(formats.weights, formats.dtype, frozenset(gpu.tflops))
        linear_flops_per_s = gpu.flops_per_s(products) * constants.flops_efficiency
        other_flops_per_s = gpu.flops_per_s(formats.dtype) * constants.flops_efficiency
        self.read_s = rank.read_bytes / bytes_per_s
        self.experts = config.experts
        self.experts_s = rank.expert_bytes / bytes_per_s  # of `read_s`, all experts' part
        self.linear_token_s = even.linear_flops_per_token / linear_flops_per_s
        self.head_token_s = even.head_flops_per_token / other_flops_per_s
        self.pair_s = even.flops_per_pair / other_flops_per_s
        self.kv_token_s = rank.kv_bytes_per_token / bytes_per_s
        self.sync_s, self.token_s, self.logits_s = _communication(config, gpu, constants, formats, parallelism)
        self.sequence_s = constants.sequence_overhead_s + self.logits_s
        self.fixed_s = config.num_layers * constants.layer_overhead_s + self.sync_s

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

    def communication_s(self, prefill_tokens: float, num_decodes: float) -> float:
        """The part of such a step in which ranks wait for each other's numbers."""
        tokens = prefill_tokens + num_decodes
        return self.sync_s + tokens * self.token_s + num_decodes * self.logits_s


def _communication(
    config: ModelConfig, gpu: Gpu, constants: Constants, formats: Formats, parallelism: Parallelism
) -> tuple[float, float, float]:
    """Seconds of any step, of each token in it, and of each whose logits are wanted.

    Tensor parallel ranks sum twice a layer and once after the embedding (all-reduce), and bring their parts of the
    logits together (all-gather). Stages hand each token's activations over: within a node by its links, else by the
    network.
    """
    tp, stages, number_bytes = parallelism.tp, parallelism.pp, BYTES[formats.dtype]
    link_per_s, network_per_s = (
        each * 1e9 * constants.bandwidth_efficiency for each in (gpu.link_gb_s, gpu.network_gb_s)
    )
    num_sums = 2 * config.num_layers + 1 if tp > 1 else 0
    num_gathers = 1 if tp > 1 else 0
    is_one_node = parallelism.num_ranks <= gpu.per_node
    stage_latency_us, stage_per_s = (
        (gpu.link_latency_us, link_per_s) if is_one_node else (gpu.network_latency_us, network_per_s)
    )
    latency_us = (num_sums + num_gathers) * gpu.link_latency_us + (stages - 1) * stage_latency_us
    token_bytes, others = config.hidden_size * number_bytes, (tp - 1) / tp
    token_s = 2 * others * token_bytes * num_sums / link_per_s + (stages - 1) * token_bytes / tp / stage_per_s
    return latency_us * 1e-6, token_s, others * config.vocab_size * number_bytes / link_per_s
