"""The numbers of ranks that a model can be split over, told before anything is loaded. The rules are those by which
`model.shard` cuts and `hub.stored` keeps groups whole; here they need the shape alone, and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.model_config import ModelConfig, StoredGroups
from penstock.core.parallelism import Parallelism

_MXFP4_GROUP = 32  # inputs
MAX_RANKS = 16  # up to here, what would work instead is looked for


@dataclass(frozen=True)
class Obstacle:
    """A dimension that cannot be shared out among so many ranks."""

    what: str
    among: str  # ranks, or stages, and how many
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what} cannot be split {self.among}" + (f": {self.why}" if self.why else "")


def split_obstacle(
    config: ModelConfig, parallelism: Parallelism, groups: StoredGroups | None = None
) -> Obstacle | None:
    """The first dimension that stands in the way; None: there is none."""
    return next(_obstacles(config, parallelism, groups), None)


def told_obstacle(config: ModelConfig, parallelism: Parallelism, groups: StoredGroups | None = None) -> str | None:
    """The same in words, with the numbers of ranks that would work; None: nothing stands in the way."""
    obstacle = split_obstacle(config, parallelism, groups)
    if obstacle is None:
        return None
    if parallelism.pp > config.num_layers:
        return str(obstacle)
    return f"{obstacle}. {what_works(config, groups, parallelism.sp if parallelism.sp > 1 else None)}"


def what_works(config: ModelConfig, groups: StoredGroups | None = None, sp: int | None = None) -> str:
    works = [tp for tp in range(2, MAX_RANKS + 1) if splits_over(config, tp, None, groups, sp) is not None]
    beside = f" with sp {sp}" if sp is not None else ""
    if not works:
        return f"No number of ranks divides it{beside}: it needs one device, or a pipeline (pp)"
    return f"Numbers of ranks that work{beside}: {'' if sp else '1, '}{', '.join(map(str, works))}"


def splits_over(
    config: ModelConfig, tp: int, ep: int | None = None, groups: StoredGroups | None = None, sp: int | None = None
) -> Parallelism | None:
    """A model over `tp` ranks, if it can be. With `ep` open, experts are cut where they can be, so that each rank has
    the same work whichever experts are chosen; else whole ones are shared out. With `sp` open, ranks share out tokens
    where they would else keep copies of the same keys and values."""
    widths = [sp] if sp is not None else [*_without_copies(config, tp), 1]
    experts = [ep] if ep is not None else [1, *([tp] if config.experts is not None and tp > 1 else [])]
    tried = (Parallelism(tp=tp, ep=each, sp=width) for each in experts for width in widths)
    return next((each for each in tried if split_obstacle(config, each, groups) is None), None)


def _without_copies(config: ModelConfig, tp: int) -> list[int]:
    """The fewest ranks that must share out tokens so that no two keep the same ones, if there are more ranks than heads
    of keys."""
    if tp <= config.num_kv_heads or config.latent is not None or config.linear is not None:
        return []
    return [next(sp for sp in range(2, tp + 1) if tp % sp == 0 and config.num_kv_heads % (tp // sp) == 0)]


def _obstacles(config: ModelConfig, parallelism: Parallelism, groups: StoredGroups | None) -> Iterator[Obstacle]:
    tp, pp, sp = parallelism.tp, parallelism.pp, parallelism.sp
    if tp % sp:
        yield Obstacle(f"{tp} ranks", f"into groups of {sp} that share out tokens", "sp must divide tp")
        return
    if pp > config.num_layers:
        yield Obstacle(f"{config.num_layers} layers", f"into {pp} stages")
    if tp == 1:
        return
    heads, kv_heads, among = config.num_heads, config.num_kv_heads, f"over {tp} ranks"
    if sp > 1 and config.latent is not None:
        yield Obstacle("tokens with latents (MLA)", f"over groups of {sp} ranks", "each rank keeps all of them")
        return
    if config.linear is not None and sp > 1:
        yield Obstacle("tokens of a recurrent state", f"over {sp} ranks", "each follows from the one before it")
        return
    if config.linear is not None and config.linear.num_key_heads % tp:
        yield Obstacle(f"{config.linear.num_key_heads} heads of linear attention", among)
    if sp > 1:
        groups_of_ranks = tp // sp
        if kv_heads % groups_of_ranks and groups_of_ranks % kv_heads:
            why = "groups must divide them, or be a multiple of them"
            yield Obstacle(f"{kv_heads} heads of keys and values", f"over {groups_of_ranks} groups of {sp} ranks", why)
        if heads % tp:
            yield Obstacle(f"{heads} query heads", among)
    elif tp > kv_heads and tp % kv_heads:
        yield Obstacle(f"{kv_heads} heads of keys and values", among, "ranks must be fewer, or a multiple of them")
    elif tp > kv_heads and heads % tp:
        yield Obstacle(f"{heads} query heads", among)
    if groups is not None and groups.is_ordered:
        yield Obstacle("inputs that are stored in an order of their own (act-order)", among)
        return
    if groups is not None and _cuts_groups(config, parallelism, groups.size):
        yield Obstacle(f"{heads} query heads", among, f"groups of {groups.size} inputs would be cut")
    for name, size in _widths(config, parallelism):
        if size % tp:
            yield Obstacle(f"{name} of {size:,}", among)
        elif groups is not None and size // tp % groups.size:
            why = f"{size // tp:,} for each, and groups of {groups.size} inputs would be cut"
            yield Obstacle(f"{name} of {size:,}", among, why)
    experts = config.experts
    if experts is not None and parallelism.ep == 1 and config.quantization == "mxfp4":
        own, left = divmod(experts.intermediate_size, tp)
        if not left and own % _MXFP4_GROUP:
            why = f"{own:,} for each, and groups of {_MXFP4_GROUP} inputs (MXFP4) would be cut"
            yield Obstacle(f"the experts' intermediate size of {experts.intermediate_size:,}", among, why)
    if experts is not None and parallelism.ep > experts.count:
        yield Obstacle(f"{experts.count} experts", among)


def _widths(config: ModelConfig, parallelism: Parallelism) -> Iterator[tuple[str, int]]:
    """Sizes of MLPs that every rank has a part of, named."""
    experts = config.experts
    if experts is None or any(not config.has_experts(layer) for layer in range(config.num_layers)):
        yield "the MLP's intermediate size", config.intermediate_size
    if experts is not None and parallelism.ep == 1:
        yield "the experts' intermediate size", experts.intermediate_size
    if experts is not None and experts.shared_intermediate_size:
        yield "the shared expert's intermediate size", experts.shared_intermediate_size


def _cuts_groups(config: ModelConfig, parallelism: Parallelism, group: int) -> bool:
    """Whether ranks would share a group of inputs of the attention's output projection: they have whole heads."""
    tp, width = parallelism.tp, config.latent.value_dim if config.latent is not None else config.head_dim
    kv_heads, each = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if kv_heads > tp and parallelism.sp == 1:  # the last ranks have one more
        few, more = divmod(kv_heads, tp)
        first = [rank * few + max(0, rank - (tp - more)) for rank in range(1, tp)]
        cuts = [head * each * width for head in first]
    else:
        cuts = [rank * (config.num_heads // tp) * width for rank in range(1, tp)]
    return any(cut % group for cut in cuts)
