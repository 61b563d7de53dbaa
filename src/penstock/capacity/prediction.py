"""Predictions for replicas of one and of several GPUs: a step, the part of it in which ranks wait for each other, what
fits, and what clients would see. All of it is arithmetic (`step_cost`, `steady`): nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.capacity.formats import Formats
from penstock.capacity.hardware import Gpu
from penstock.capacity.memory import Memory
from penstock.capacity.model_bytes import pairs
from penstock.capacity.plan import Case, Setup, engine_of, replica_memory, widths
from penstock.capacity.splitting import split_obstacle
from penstock.capacity.steady import Expected
from penstock.capacity.step_cost import ENGINES, StepCost
from penstock.core.errors import ConfigError
from penstock.core.nodes import fewest_nodes
from penstock.core.parallelism import Parallelism

DECODES, CONTEXT, PROMPT = 32, 1024, 8192  # of the steps that are told


@dataclass(frozen=True)
class Steps:
    """Seconds of some steps, and the share of each in which ranks wait for each other's numbers."""

    decode_s: float  # of one sequence
    batch_s: float  # of `DECODES` sequences
    batch_share: float
    prompt_s: float  # of `PROMPT` tokens of a prompt
    prompt_share: float


@dataclass(frozen=True)
class Prediction:
    """One replica. `steps` and what follows are None where its weights do not fit."""

    parallelism: Parallelism
    num_nodes: int
    over: str  # what joins its GPUs, in words; "": it has one
    memory: Memory
    steps: Steps | None = None
    rate: float = 0.0  # requests per second within the targets
    output_tokens_per_s: float = 0.0  # at that rate
    bound: str = "weights"  # what stands against more, or against any
    expected: Expected | None = None  # at that rate; None: no rate keeps the targets
    num_replicas: int = 0  # of all GPUs


@dataclass(frozen=True)
class Predictions:
    """All that was asked for together, and what it was reckoned with."""

    case: Case
    formats: Formats
    gpus: Sequence[Gpu]  # the same one with each link and network
    found: Sequence[Prediction]


def predictions(case: Case, setup: Setup, num_gpus: int, gpus: Sequence[Gpu]) -> Iterator[Prediction]:
    """Replicas on `num_gpus` GPUs: of a part of them by width of tensor parallelism, of all of them in every way.

    `gpus`: the GPU of the setup with one link or network after the other; what has no need of one is told once.
    """
    told = set()
    for gpu in gpus:
        own = replace(case, hardware={**case.hardware, setup.gpu: gpu})
        for parallelism in _layouts(own, num_gpus):
            key = parallelism, way(gpu, parallelism)
            if key not in told:
                told.add(key)
                yield predict(own, setup, parallelism, num_gpus // parallelism.num_ranks)


def predict(case: Case, setup: Setup, parallelism: Parallelism, num_replicas: int = 1) -> Prediction:
    gpu, memory = case.hardware[setup.gpu], replica_memory(case, setup, parallelism)
    nodes = fewest_nodes(parallelism, gpu.per_node)
    found = Prediction(parallelism, len(nodes.sizes), way(gpu, parallelism), memory, num_replicas=num_replicas)
    if not memory.kv_tokens:
        return found
    engine = engine_of(case, setup, parallelism)
    each, bound = engine.max_rate()
    rate = each * parallelism.pp
    return replace(
        found,
        steps=_steps(case, gpu, setup.formats, parallelism),
        rate=rate,
        output_tokens_per_s=rate * case.demand.profile.output_tokens,
        bound=bound,
        expected=engine.expected(each) if rate else None,
    )


def way(gpu: Gpu, parallelism: Parallelism) -> str:
    """The links between the GPUs of a replica, in words."""
    nodes = fewest_nodes(parallelism, gpu.per_node)
    joined = [gpu.link] if max(nodes.sizes) > 1 else []
    if len(nodes.sizes) > 1:
        joined.append(f"{len(nodes.sizes)} nodes by {gpu.network_name}")
    return ", ".join(joined)


def check_count(num_gpus: int, num_nodes: int) -> None:
    if num_gpus < 1 or num_nodes < 1 or num_gpus % num_nodes:
        reason = f"{num_gpus} GPUs on {num_nodes} nodes: as many on each, and one at least"
        raise ConfigError(reason, param="gpus" if num_gpus < 1 else "nodes")


def _layouts(case: Case, num_gpus: int) -> list[Parallelism]:
    """The smallest first; of equals, the fewest stages."""
    return sorted(set(_tried(case, num_gpus)), key=lambda each: (each.num_ranks, each.pp, each.ep))


def _tried(case: Case, num_gpus: int) -> Iterator[Parallelism]:
    for width in widths(case, num_gpus):
        stages, rest = divmod(num_gpus, width.tp)
        piped = [replace(width, pp=stages)] if stages > 1 and not rest and stages <= case.config.num_layers else []
        for each in (width, *piped):
            yield each
            shared_out = replace(each, ep=each.tp)
            has_choice = case.config.experts is not None and each.tp > 1 and each.ep == 1
            if has_choice and split_obstacle(case.config, shared_out) is None:
                yield shared_out


def _steps(case: Case, gpu: Gpu, formats: Formats, parallelism: Parallelism) -> Steps:
    cost = StepCost(case.config, gpu, ENGINES[case.engine], formats=formats, parallelism=parallelism)
    batch_s, prompt_s = cost.seconds(0, 0, DECODES, DECODES * CONTEXT), cost.seconds(PROMPT, pairs(0, PROMPT), 0, 0)
    return Steps(
        cost.seconds(0, 0, 1, CONTEXT),
        batch_s,
        cost.communication_s(0, DECODES) / batch_s,
        prompt_s,
        cost.communication_s(PROMPT, 0) / prompt_s,
    )
