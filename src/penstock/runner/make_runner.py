"""The runner of a loaded model on its device; a GPU's kernels are compiled and its graphs captured on the way.

Modules that need Triton are imported here, and late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.model_config import Experts, ModelConfig
from penstock.model.batch import LayerState
from penstock.model.loading import load_model
from penstock.model.lora import with_adapters
from penstock.model.ops import LayerKV
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import LoneRank
from penstock.model.shard import Shard
from penstock.model.weights import Site
from penstock.quant import to_quant
from penstock.runner.kernels import Kernels
from penstock.runner.limits import Limits
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.lora import RunnerAdapters
from penstock.runner.moving import BlockMover
from penstock.runner.profile import adapted, decode_step, forgetting_step, images_step, largest_step, rows_step
from penstock.runner.runner import ModelRunner, RankRunner
from penstock.runner.step_meter import StepMeter, communication_of

if TYPE_CHECKING:
    from penstock.runner.cuda_runner import CudaRunner

_SMALL_VOCABULARY = 1024  # of the model that kernels are compiled with: a head of full size would take gigabytes


def make_runner(
    loaded: LoadedModel,
    kv: list[LayerKV],
    mover: BlockMover | None = None,
    states: Sequence[LayerState] | None = None,
) -> RankRunner:
    """`states`: of sequences, where they have recurrent ones; None: new ones. A GPU's runner has captured its graphs
    and done the largest step: it has taken all the memory it will ever need."""
    limits = loaded.limits
    if loaded.kernels.name == "triton":
        captured = _triton_runner(loaded, kv, mover, states)
        captured.capture()
        captured.rehearse(largest_step(limits))
        if loaded.adapters is not None:
            captured.rehearse(adapted(largest_step(limits)))
        if limits.most_rows:
            captured.rehearse(rows_step(limits))
        if loaded.images is not None:
            captured.rehearse(images_step(limits, loaded.images.config))
            captured.rehearse(forgetting_step(limits, loaded.images.config))
        return captured
    meter = StepMeter(communication_of(loaded.ranks, loaded.stage))
    states = loaded.allocate_states() if states is None else states
    runner = ModelRunner(loaded.model, loaded.ops, kv, loaded.adapters, mover, meter, loaded.images, states)
    if loaded.ops.device.type == "cuda":
        runner.submit(largest_step(limits))
        if loaded.images is not None:
            runner.submit(images_step(limits, loaded.images.config))
            runner.submit(forgetting_step(limits, loaded.images.config))
    return runner


def _triton_runner(
    loaded: LoadedModel,
    kv: list[LayerKV],
    mover: BlockMover | None = None,
    states: Sequence[LayerState] | None = None,
) -> CudaRunner:
    from penstock.runner.cuda_runner import CudaRunner

    return CudaRunner(
        loaded.model,
        loaded.ops,
        kv,
        loaded.limits,
        loaded.adapters,
        mover,
        loaded.ranks,
        loaded.stage,
        loaded.images,
        loaded.allocate_states() if states is None else states,
    )


@contextmanager
def compiling_ahead(
    kernels: Kernels, config: ModelConfig, limits: Limits, shard: Shard, *, adapts: bool = False
) -> Iterator[None]:
    """Compiles Triton's kernels in a thread meanwhile: a new machine waits for disk and compiler at once."""
    if kernels.name != "triton":
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as pool:
        compiled = pool.submit(_compile, kernels, config, limits, shard, adapts)
        yield
        compiled.result()


def _few(experts: Experts) -> Experts:
    """No more than a token is given, in the layer that there is, and of no groups."""
    routing = experts.routing and replace(experts.routing, num_groups=1, groups_per_token=1)
    return replace(experts, count=experts.per_token, dense_layers=(), routing=routing)


def _compile(kernels: Kernels, config: ModelConfig, limits: Limits, shard: Shard, adapts: bool) -> None:
    """Steps of every kind on one layer of the model's shape. No graphs: capturing forbids all others to allocate."""
    ops = kernels.make_ops()
    experts = config.experts and _few(config.experts)
    single = replace(config, num_layers=1, windows=config.windows[:1], vocab_size=_SMALL_VOCABULARY, experts=experts)
    if config.linear is not None:  # one layer of each kind
        single = replace(single, num_layers=2, linear=replace(config.linear, layers=(0,)))
    sites: list[Site] = []
    ranks = LoneRank(shard)
    model = load_model(
        RandomCheckpoint(single), ops, quantize=partial(to_quant, kernels.quant), sites=sites, ranks=ranks
    )
    loaded = LoadedModel(kernels, ops, model, limits, ranks=ranks)
    if adapts:
        single_slot = with_adapters(model, sites, ops, 1, max_rank=1)
        loaded = replace(loaded, model=single_slot, adapters=RunnerAdapters(single_slot.bank))
    shape = loaded.state_shape
    states = shape.allocate(0, ops.device) if shape is not None else []  # no sequence's: all are in slot 0
    runner = _triton_runner(loaded, loaded.allocate_kv(1), states=states)
    few = min(16, limits.max_num_seqs)
    with_drafts = [rows_step(limits)] if limits.most_rows else []
    for step in (decode_step(1, limits), decode_step(few, limits), largest_step(limits), *with_drafts):
        runner.submit(step).result()
        if adapts:
            runner.submit(adapted(step)).result()
