"""The cost of a step of a model on GPUs: a roofline with four constants, the same for every model, format and GPU.

    step = layers x overhead                     what launching a layer's kernels costs, whatever is in the step
         + max(weights read, products computed)
         + attention of prompts, computed
         + context of decodes, read
         + decodes x overhead                    what the host does for each sequence: schedule, sample, hand out
         + communication                         only on several GPUs: see `communication_s`

The sum is `step_times`; here its parts are reckoned. It knows no scheduler and no request: a step is four numbers. See
docs/plan.md for how the constants were fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.capacity.formats import BYTES, Formats, compute_format
from penstock.capacity.hardware import Gpu
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.rank_share import rank_config
from penstock.capacity.step_times import StepTimes
from penstock.core.model_config import ModelConfig
from penstock.core.nodes import fewest_nodes
from penstock.core.parallelism import Parallelism

# An all-reduce of 1 to 32 KB of the eight H100 of a node, by NCCL (NVIDIA/nccl #2094). It is the first part of one over
# several nodes; ranks of one node have faster ways (`Gpu.link_latency_us`).
NCCL_SUM_US = 33.0


@dataclass(frozen=True)
class Constants:
    """The part of a datasheet that a serving engine gets. All that is fitted."""

    bandwidth_efficiency: float  # of memory bandwidth, for weights and KV cache
    flops_efficiency: float  # of the peak for dense products, for linear layers and attention
    layer_overhead_s: float  # per layer and step: launches, norms, and the gaps between kernels
    sequence_overhead_s: float  # per sequence that decodes and step
    wide_sum_us: float = 0.0  # latency of a sum within a node is at least so much, if the replica has several nodes


# Fitted by `python -m tools.roofline` to what was measured on one H200: 19 cells each, none more than 16 % off.
VLLM = Constants(bandwidth_efficiency=0.91, flops_efficiency=0.60, layer_overhead_s=62e-6, sequence_overhead_s=12e-6)
PENSTOCK = Constants(
    bandwidth_efficiency=0.89,
    flops_efficiency=0.55,
    layer_overhead_s=22e-6,
    sequence_overhead_s=2.3e-6,
    wide_sum_us=NCCL_SUM_US,  # it has symmetric memory on one node alone
)
ENGINES = {"vllm": VLLM, "penstock": PENSTOCK}


class StepCost(StepTimes):
    """Parts of a step by a model's shape, its number formats and a GPU's datasheet.

    Of several ranks the largest one's part counts: the others wait for it. With a pipeline a step is one micro-batch's
    way through all stages; as many others are under way in the meantime.
    """

    __slots__ = ("logits_s", "sync_s")

    def __init__(
        self,
        config: ModelConfig,
        gpu: Gpu,
        constants: Constants = VLLM,
        *,
        formats: Formats = Formats(),  # noqa: B008 (frozen)
        parallelism: Parallelism = Parallelism(),  # noqa: B008 (frozen)
    ) -> None:
        """Ranks are on as few nodes as they fit on."""
        rank = ModelBytes(rank_config(config, parallelism), formats)
        # Experts that are shared out whole are as much work as experts that are cut, if each is chosen as often.
        even = ModelBytes(rank_config(config, replace(parallelism, ep=1)), formats)
        bytes_per_s = gpu.bytes_per_s * constants.bandwidth_efficiency
        products = compute_format(formats.weights, formats.dtype, frozenset(gpu.tflops))
        linear_flops_per_s = gpu.flops_per_s(products) * constants.flops_efficiency
        other_flops_per_s = gpu.flops_per_s(formats.dtype) * constants.flops_efficiency
        self.sync_s, token_s, self.logits_s = _communication(config, gpu, constants, formats, parallelism)
        super().__init__(
            fixed_s=config.num_layers * constants.layer_overhead_s + self.sync_s,
            read_s=rank.read_bytes / bytes_per_s,
            linear_token_s=even.linear_flops_per_token / linear_flops_per_s,
            head_token_s=even.head_flops_per_token / other_flops_per_s,
            token_s=token_s,
            pair_s=even.flops_per_pair / other_flops_per_s,
            kv_token_s=rank.kv_bytes_per_token / parallelism.sp / bytes_per_s,
            # A recurrent state is read and written at every token.
            sequence_s=constants.sequence_overhead_s + self.logits_s + 2 * rank.config.state_bytes / bytes_per_s,
            experts_s=rank.expert_bytes / bytes_per_s,
            expert_share=config.experts.per_token / config.experts.count if config.experts is not None else 1.0,
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
    logits together (all-gather); over several nodes all adapters of a node carry these. Those that share out tokens
    exchange queries and what they found, in every layer. Each rank of a stage hands the activations to its like in the
    next one: within a node by its links, else by the network.
    """
    tp, stages, number_bytes = parallelism.tp, parallelism.pp, BYTES[formats.dtype]
    nodes = fewest_nodes(parallelism, gpu.per_node)
    link_per_s, network_per_s = (
        each * 1e9 * constants.bandwidth_efficiency for each in (gpu.link_gb_s, gpu.network_gb_s)
    )
    if gpu.shares_network:
        network_per_s /= max(nodes.sizes)
    sum_us, sum_per_s = gpu.link_latency_us, link_per_s
    if len(nodes.sizes) > 1:
        sum_us = max(sum_us, constants.wide_sum_us)
    exchange_us, exchange_per_s = sum_us, sum_per_s  # neighbours are on one node, unless they are too many for it
    if nodes.spans(range(parallelism.sp)):
        exchange_us, exchange_per_s = gpu.network_latency_us, min(link_per_s, network_per_s)
    if nodes.spans(range(tp)):
        sum_us = gpu.network_latency_us + (max(sum_us, NCCL_SUM_US) if nodes.sizes[0] > 1 else 0.0)
        sum_per_s = min(link_per_s, network_per_s * nodes.sizes[0])
    num_sums, num_gathers = (2 * config.num_layers + 1, 1) if tp > 1 else (0, 0)
    between = sum(nodes.spans(range(tp * stage - 1, tp * stage + 1)) for stage in range(1, stages))
    within = stages - 1 - between
    num_exchanges = 2 * config.num_layers if parallelism.sp > 1 else 0
    latency_us = (
        (num_sums + num_gathers) * sum_us
        + num_exchanges * exchange_us
        + within * gpu.link_latency_us
        + between * gpu.network_latency_us
    )
    token_bytes, others = config.hidden_size * number_bytes, (tp - 1) / tp
    token_s = 2 * others * token_bytes * num_sums / sum_per_s
    # Each rank brings its heads' queries to the others of its group, and gets as much back from each of them.
    exchanged = (parallelism.sp - 1) * config.num_heads * config.head_dim / tp
    token_s += num_exchanges * exchanged * number_bytes / exchange_per_s
    token_s += token_bytes * (within / link_per_s + between / network_per_s)
    return latency_us * 1e-6, token_s, others * config.vocab_size * number_bytes / sum_per_s
