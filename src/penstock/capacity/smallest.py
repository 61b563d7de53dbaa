"""The smallest parallelism that a model fits on, with the reason why it is not smaller: what `auto` comes to.

Numbers in, a choice out: it knows the GPUs as figures, and asks no device. A model fits where its weights, its largest
step and the keys and values of one whole context have room on every rank. Layers are split before a pipeline is made of
them, since only that makes a token come sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.capacity.formats import Formats
from penstock.capacity.hardware import by_driver_name
from penstock.capacity.memory import MEMORY_FRACTION, Memory, memory_in
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.splitting import split_obstacle, splits_over, told_obstacle, what_works
from penstock.capacity.step_cost import PENSTOCK, StepCost
from penstock.core.context import longest_context
from penstock.core.devices import VisibleGpus
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig, StoredGroups
from penstock.core.nodes import auto_stages, spread
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings

DECODES, CONTEXT = 32, 1024  # sequences and tokens of each, in the step whose communication share is told
_GIB = 1 << 30


@dataclass(frozen=True)
class Needs:
    """A model, as one engine is to run it."""

    config: ModelConfig
    formats: Formats = Formats()  # noqa: RUF009 (frozen)
    chunk_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int | None = None  # None: the model's context
    memory_fraction: float | None = None  # None: 0.9
    groups: StoredGroups | None = None
    beside_bytes: int = 0  # on a rank, of what is not split: a model to draft with, copies of experts

    @property
    def context(self) -> int:
        return self.max_model_len or self.config.context_length


def needs_of(
    settings: EngineSettings,
    config: ModelConfig,
    *,
    has_fp8: bool = True,
    groups: StoredGroups | None = None,
    draft: ModelConfig | None = None,
) -> Needs:
    """A model as these settings have it served on GPUs. `draft`: a model to guess with, which is not split."""
    defaults = Needs(config)
    chunk_tokens = settings.chunk_tokens or defaults.chunk_tokens
    formats = _formats(settings, config, has_fp8=has_fp8)
    beside_bytes = _lora_bytes(config, settings) + _redundant_bytes(config, settings, formats)
    if draft is not None:
        beside_bytes += ModelBytes(draft).stored_bytes
    return Needs(
        config,
        formats,
        chunk_tokens,
        min(settings.max_num_seqs or defaults.max_num_seqs, chunk_tokens),
        longest_context(settings, config),
        settings.memory_fraction,
        groups,
        beside_bytes,
    )


def _formats(settings: EngineSettings, config: ModelConfig, *, has_fp8: bool) -> Formats:
    """Files in FP8 are widened where the GPU has none."""
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    quant = config.quantization if settings.quant == "auto" else settings.quant
    if quant == "none" or (quant == "fp8" and not has_fp8):
        quant = None
    return Formats(quant or dtype, dtype if settings.kv_dtype == "auto" else settings.kv_dtype, dtype)


def _lora_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    """Memory that is set aside for adapters, of all linears but experts, as if no rank had less than all of it."""
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = 2 * (config.hidden_size + heads) + 2 * (config.hidden_size + keys)
    if latent := config.latent:
        queries, down = config.num_heads * latent.query_dim, (latent.query_rank or 0) + latent.cached_dim
        made_of = latent.query_rank or config.hidden_size
        attention = config.hidden_size + down + made_of + queries
        attention += config.num_heads * latent.value_dim + config.hidden_size
    mlp = 3 * (config.hidden_size + config.intermediate_size) if config.experts is None else 0
    numbers = config.num_layers * (attention + mlp) * settings.max_lora_rank
    return 2 * numbers * (settings.max_loras or 0)


def _redundant_bytes(config: ModelConfig, settings: EngineSettings, formats: Formats) -> int:
    """Copies of experts that each rank has beside its share of them."""
    experts = config.experts
    if experts is None or not settings.redundant_experts:
        return 0
    more = replace(config, experts=replace(experts, count=experts.count + settings.redundant_experts))
    copies = ModelBytes(more, formats).stored_bytes - ModelBytes(config, formats).stored_bytes
    return -(-copies // (settings.pp or 1))


@dataclass(frozen=True)
class Choice:
    parallelism: Parallelism
    memory: Memory | None = None  # of the fullest rank; None: on no GPU
    communication: float | None = (
        None  # share of a step of 32 decodes; None: nobody has figures of this GPU, or one rank
    )
    link: str = ""  # what joins the GPUs, in words; "": there is one, or nobody knows
    why: str = ""  # why it is not smaller; "": it is the smallest, or was asked for

    @property
    def lines(self) -> tuple[str, ...]:
        """The choice in words, its reason below; none where there is one rank."""
        if self.parallelism.num_ranks == 1:
            return ()
        said = str(self.parallelism)
        if self.memory is not None:
            said += f": {_gib(self.memory.weight_bytes)} of weights and {_gib(self.memory.kv_bytes)} of KV cache a rank"
        if self.communication is not None:
            over = f" over {self.link}" if self.link else ""
            said += (
                f"; communication{over}, predicted: {100 * self.communication:.0f} % of a step of {DECODES} sequences"
            )
        return (said, self.why) if self.why else (said,)


def choice_of(settings: EngineSettings, needs: Needs, visible: VisibleGpus) -> Choice:
    """The parallelism that settings ask for, on their nodes; what they leave open is chosen."""
    visible = msgspec.structs.replace(visible, num_nodes=settings.nnodes or 1)
    return choose_parallelism(needs, visible, tp=settings.tp, ep=settings.ep, pp=settings.pp, sp=settings.sp)


def choose_parallelism(
    needs: Needs,
    visible: VisibleGpus,
    *,
    tp: int | None = None,
    ep: int | None = None,
    pp: int | None = None,
    sp: int | None = None,
) -> Choice:
    """Widths that are None are open. A width that was asked for is taken as it is, if the shape can be split so."""
    num_nodes = visible.num_nodes
    if tp is None and ep is not None and ep > 1:
        tp = ep  # experts are shared out among the ranks of tp
    if tp is not None:
        return _as_asked(needs, visible, tp, ep, pp or auto_stages(tp, num_nodes), sp)
    stages = pp or auto_stages(None, num_nodes)
    if len(visible.gpus) * num_nodes <= stages * (sp or 1):
        return _as_asked(needs, visible, sp or 1, ep, stages, sp)  # and so are tokens
    return _smallest(needs, visible, ep, pp, sp)


def _as_asked(needs: Needs, visible: VisibleGpus, tp: int, ep: int | None, pp: int, sp: int | None) -> Choice:
    found = splits_over(needs.config, tp, ep, needs.groups, sp)
    parallelism = replace(found or Parallelism(tp=tp, ep=ep or 1, sp=sp or 1), pp=pp)
    if (obstacle := told_obstacle(needs.config, parallelism, needs.groups)) is not None:
        raise ConfigError(obstacle, param=_asked_wrongly(needs, parallelism))
    return _judged(needs, visible, parallelism)


def _asked_wrongly(needs: Needs, asked: Parallelism) -> str:
    """The setting that an obstacle is put down to."""
    if asked.pp > needs.config.num_layers:
        return "pp"
    is_due_to_sp = asked.sp > 1 and split_obstacle(needs.config, replace(asked, sp=1), needs.groups) is None
    return "sp" if is_due_to_sp else "tp"


def _smallest(needs: Needs, visible: VisibleGpus, ep: int | None, pp: int | None, sp: int | None) -> Choice:
    refused: dict[str, list[int]] = {}  # widths by what is said against them
    fitting: list[Choice] = []  # weights and a step fit, a whole context does not
    stages = pp or auto_stages(None, visible.num_nodes)
    most = len(visible.gpus) * visible.num_nodes
    for tp in range(sp or 1, most // stages + 1, sp or 1):
        found = splits_over(needs.config, tp, ep, needs.groups, sp)
        if found is None:
            obstacle = split_obstacle(needs.config, Parallelism(tp=tp, ep=ep or 1, sp=sp or 1), needs.groups)
            assert obstacle is not None
            refused.setdefault(f"{obstacle.what} cannot be split so", []).append(tp)
            continue
        parallelism = replace(found, pp=stages)
        if not _has_gpus(parallelism, visible):
            refused.setdefault(f"it cannot be spread over {visible.num_nodes} nodes", []).append(tp)
            continue
        choice = _judged(needs, visible, parallelism)
        memory = choice.memory
        assert memory is not None
        if memory.kv_tokens >= needs.context:
            return replace(choice, why=f"not fewer: {_told(refused)}" if refused else "")
        if memory.kv_tokens:
            fitting.append(choice)
            refused.setdefault(f"room for {memory.kv_tokens:,} tokens, and a context is {needs.context:,}", []).append(
                tp
            )
        else:
            room_bytes = _room_bytes(needs, visible, parallelism)
            taken = f"{_gib(memory.weight_bytes)} of weights and {_gib(memory.step_bytes)} for a step"
            refused.setdefault(f"{taken}, and {_gib(room_bytes)} may be used", []).append(tp)
    pipelines = _pipelines(needs, visible, ep, sp, more_than=stages) if pp is None else []
    for choice in pipelines:
        assert choice.memory is not None
        if choice.memory.kv_tokens >= needs.context:
            return replace(choice, why=f"no number of ranks of tp alone has room for a whole context: {_told(refused)}")
        if choice.memory.kv_tokens:
            fitting.append(choice)
    if not fitting:
        raise ConfigError(_nothing_fits(needs, visible, refused, pipelines), param="tp")
    largest = max(fitting, key=lambda each: each.memory.kv_tokens if each.memory else 0)
    return replace(largest, why=f"no number of ranks has room for a whole context: {_told(refused)}")


def _pipelines(needs: Needs, visible: VisibleGpus, ep: int | None, sp: int | None, *, more_than: int) -> list[Choice]:
    """Layouts of more stages than so many: those with the fewest ranks first, of these the ones that split layers
    most."""
    choices = []
    for num_ranks in range(2, len(visible.gpus) * visible.num_nodes + 1):
        for tp in range(num_ranks // (more_than + 1), 0, -1):
            found = splits_over(needs.config, tp, ep, needs.groups, sp) if num_ranks % tp == 0 else None
            if found is None:
                continue
            parallelism = replace(found, pp=num_ranks // tp)
            if parallelism.pp <= needs.config.num_layers and _has_gpus(parallelism, visible):
                choices.append(_judged(needs, visible, parallelism))
    return choices


def _has_gpus(parallelism: Parallelism, visible: VisibleGpus) -> bool:
    """Whether each rank has a GPU of its own."""
    try:
        return max(spread(parallelism, visible.num_nodes).sizes) <= len(visible.gpus)
    except ConfigError:
        return False


def _judged(needs: Needs, visible: VisibleGpus, parallelism: Parallelism) -> Choice:
    num_ranks = parallelism.num_ranks
    if not visible.gpus:
        return Choice(parallelism)
    memory = memory_in(
        _room_bytes(needs, visible, parallelism),
        needs.config,
        formats=needs.formats,
        parallelism=parallelism,
        chunk_tokens=needs.chunk_tokens,
        max_num_seqs=needs.max_num_seqs,
    )
    if num_ranks == 1:
        return Choice(parallelism, memory)
    share, link = _communication(needs, visible, parallelism)
    return Choice(parallelism, memory, share, link)


def _room_bytes(needs: Needs, visible: VisibleGpus, parallelism: Parallelism) -> int:
    """Memory of the fullest GPU that may be used: a share of all of it, if nobody else uses that."""
    fraction = needs.memory_fraction or MEMORY_FRACTION
    num_here = max(spread(parallelism, visible.num_nodes).sizes)
    rooms = [min(int(fraction * gpu.total_bytes), gpu.free_bytes) for gpu in visible.gpus[:num_here]]
    ranks_on_each = -(-num_here // len(rooms))  # one, but in tests
    return max(0, min(rooms) // ranks_on_each - needs.beside_bytes)


def _communication(needs: Needs, visible: VisibleGpus, parallelism: Parallelism) -> tuple[float | None, str]:
    """The share of a decode step, and by what way."""
    num_here = max(spread(parallelism, visible.num_nodes).sizes)
    if num_here > len(visible.gpus):
        return None, ""  # some share a GPU
    gpu, joined = by_driver_name(visible.gpus[0].name), visible.num_nvlinked
    link = "" if joined is None else "NVLink" if joined >= num_here else "PCIe"
    if gpu is None:
        return None, link
    gpu = replace(gpu.over_pcie() if link == "PCIe" else gpu, per_node=num_here)
    cost = StepCost(
        needs.config,
        gpu,
        PENSTOCK,
        formats=needs.formats,
        parallelism=parallelism,
    )
    if visible.num_nodes > 1:
        link = f"{link} and the network" if link else "the network"
    return cost.communication_s(0, DECODES) / cost.seconds(0, 0, DECODES, DECODES * CONTEXT), link


def _told(refused: dict[str, list[int]]) -> str:
    return "; ".join(f"TP{', TP'.join(map(str, widths))}: {reason}" for reason, widths in refused.items())


def _nothing_fits(
    needs: Needs, visible: VisibleGpus, refused: dict[str, list[int]], pipelines: Sequence[Choice]
) -> str:
    stored = _gib(ModelBytes(needs.config, needs.formats).stored_bytes)
    where = "here" if visible.num_nodes == 1 else f"on each of {visible.num_nodes} nodes"
    nor = ", nor does a pipeline (pp) of them" if pipelines else ""
    return (
        f"the model, {stored} of weights in {needs.formats}, does not fit on the {len(visible.gpus)} GPUs {where}: "
        f"{_told(refused)}{nor}. {what_works(needs.config, needs.groups)}. Use more or larger GPUs, or smaller weights "
        "(quant); to try all the same, set tp"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
