"""Plans of hardware for a demand: how each layout of a model on a GPU would do, and the one that costs least.

A layout is a GPU, number formats and parallelism. Every one is judged by memory first and by its targets second; one
that does not do says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.capacity.demand import Demand
from penstock.capacity.formats import Formats
from penstock.capacity.hardware import Gpu
from penstock.capacity.memory import Memory, memory_of
from penstock.capacity.splitting import splits_over
from penstock.capacity.steady import Engine, Expected, Limits
from penstock.capacity.step_cost import ENGINES, StepCost
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism

HOURS_PER_MONTH = 730
MAX_STAGES = 16


@dataclass(frozen=True)
class Setup:
    """The setup that a plan may choose, or is told."""

    gpu: str
    formats: Formats = Formats()  # noqa: RUF009 (frozen)
    parallelism: Parallelism | None = None  # None: the cheapest that does
    uses_prefix_cache: bool = True


@dataclass(frozen=True)
class Case:
    """The part of a plan that stays the same while setups are compared."""

    config: ModelConfig
    demand: Demand
    hardware: Mapping[str, Gpu]
    max_num_seqs: int = 256
    chunk_tokens: int = 8192
    engine: str = "vllm"  # whose constants
    num_spare: int = 0  # replicas beyond those that the load needs


@dataclass(frozen=True)
class Layout:
    """One way to run the model, judged."""

    setup: Setup
    parallelism: Parallelism
    memory: Memory
    num_sequences: int  # of this demand's mean length that fit a replica's KV cache
    rate_per_replica: float  # requests per second within the targets; 0: none
    bound: str  # what stands against more, or against any
    num_replicas: int = 0
    num_gpus: int = 0
    cost_per_month: float = math.inf
    alone: Expected | None = None  # with nothing else on the replica; None: it does not fit
    expected: Expected | None = None  # at the load that each replica then has; None: it does not do

    @property
    def is_possible(self) -> bool:
        return self.num_replicas > 0

    @property
    def rank(self) -> tuple[float, int]:
        """Cheapest first; of equals the one with fewer GPUs in a replica."""
        return self.cost_per_month, self.parallelism.num_ranks


def layouts(case: Case, setup: Setup) -> list[Layout]:
    """Layouts by number of GPUs per replica; none where the GPU does not have the formats."""
    if not case.hardware[setup.gpu].supports(setup.formats):
        return []
    found = [_judge(case, setup, each) for each in _parallelisms(case, setup)]
    return sorted(found, key=lambda layout: (layout.parallelism.num_ranks, layout.parallelism.pp))


def best(case: Case, setup: Setup) -> Layout | None:
    """None: no layout keeps the targets."""
    possible = [layout for layout in layouts(case, setup) if layout.is_possible]
    return min(possible, key=lambda layout: layout.rank, default=None)


def cheapest(case: Case, setup: Setup, gpus: Iterable[str]) -> Layout | None:
    found = [best(case, replace(setup, gpu=name)) for name in gpus]
    return min((layout for layout in found if layout), key=lambda layout: layout.rank, default=None)


def _parallelisms(case: Case, setup: Setup) -> Iterator[Parallelism]:
    """Yields per width of tensor parallelism the fewest stages that hold the weights; more where memory may bind."""
    if setup.parallelism is not None:
        yield setup.parallelism
        return
    wanted = case.max_num_seqs * case.demand.profile.context
    max_stages = min(MAX_STAGES, case.config.num_layers)
    for width in widths(case, case.hardware[setup.gpu].per_node):
        stages = 1
        while stages <= max_stages:
            each = replace(width, pp=stages)
            kv_tokens = replica_memory(case, setup, each).kv_tokens
            if kv_tokens or stages == 1:
                yield each
            if kv_tokens >= wanted:
                break
            stages *= 2


def widths(case: Case, most: int) -> Iterator[Parallelism]:
    """Sizes of tensor parallelism up to `most`, by powers of two: other GPUs of a node are another replica's."""
    tp = 1
    while tp <= most:
        if case.engine == "penstock":
            found = splits_over(case.config, tp)
        else:
            found = Parallelism(tp=tp) if case.config.num_heads % tp == 0 else None
        if found is not None:
            yield found
        tp *= 2


def replica_memory(case: Case, setup: Setup, parallelism: Parallelism) -> Memory:
    return memory_of(
        case.config,
        case.hardware[setup.gpu],
        formats=setup.formats,
        parallelism=parallelism,
        chunk_tokens=case.chunk_tokens,
        max_num_seqs=case.max_num_seqs,
    )


def engine_of(case: Case, setup: Setup, parallelism: Parallelism) -> Engine:
    """One of the micro-batches that are on their way through a pipeline: it has its share of the cache and of the
    sequences."""
    demand = case.demand if setup.uses_prefix_cache else replace(case.demand, prefix_share=0.0)
    gpu, constants = case.hardware[setup.gpu], ENGINES[case.engine]
    cost = StepCost(case.config, gpu, constants, formats=setup.formats, parallelism=parallelism)
    kv_tokens = replica_memory(case, setup, parallelism).kv_tokens // parallelism.pp
    limits = Limits(kv_tokens, max(1, case.max_num_seqs // parallelism.pp), case.chunk_tokens)
    return Engine(cost, demand.profile, limits, demand.target)


def _judge(case: Case, setup: Setup, parallelism: Parallelism) -> Layout:
    memory = replica_memory(case, setup, parallelism)
    context = case.demand.profile.context
    layout = Layout(setup, parallelism, memory, int(memory.kv_tokens // context), 0.0, "weights")
    if memory.kv_tokens == 0:
        return layout
    engine = engine_of(case, setup, parallelism)
    layout = replace(layout, alone=engine.expected(0.0))
    rate, bound = engine.max_rate()
    rate *= parallelism.pp
    if rate == 0:
        return replace(layout, bound=bound)
    needed = math.ceil(case.demand.rate / rate * (1 - 1e-9))
    num_replicas = needed + case.num_spare
    num_gpus = num_replicas * parallelism.num_ranks
    return replace(
        layout,
        rate_per_replica=rate,
        bound=bound,
        num_replicas=num_replicas,
        num_gpus=num_gpus,
        cost_per_month=num_gpus * case.hardware[setup.gpu].price_per_hour * HOURS_PER_MONTH,
        expected=engine.expected(case.demand.rate / num_replicas / parallelism.pp),
    )
