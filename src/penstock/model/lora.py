"""LoRA adapters over a model that is loaded: many of them in one batch, which is not split for their sake.

Every token has the adapter of its sequence, or none. A linear layer computes its product for all tokens together; then
each adapter in the batch adds `scale * B(A(x))` to the rows that are its own. Its matrices are linears of the same
operations, so where those give a row the same result to the bit whatever is beside it, so does an adapted layer. A
batch without adapters never comes here: it runs the layers as they were loaded.

The slots are assigned elsewhere; this module holds what lies in the slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.peft import MAX_RANK, LowRank, PeftAdapter
from penstock.hub.stored import StoredTensor
from penstock.model.batch import Batch
from penstock.model.layers import CausalLM
from penstock.model.lora_slots import AdaptedLinear, HostPair
from penstock.model.ops import AttentionSpec, LayerKV, Ops
from penstock.model.stages import Stage
from penstock.model.weights import DTYPES, Site

T = TypeVar("T")


@dataclass(frozen=True)
class HostAdapter:
    """An adapter that fits this model, ready to be put into a slot."""

    digest: str
    prepared: Any  # for the slots of this model
    num_bytes: int
    rank: int


class AdapterBank:
    """The adapters of one model: made to fit it, and put into slots."""

    def __init__(
        self,
        ops: Ops,
        sites: Sequence[Site],
        num_slots: int,
        max_rank: int = MAX_RANK,
        is_elsewhere: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`is_elsewhere`: whether a linear is another pipeline stage's, which fits it there."""
        self.num_slots = num_slots
        self.slots = ops.lora_slots(sites, num_slots, max_rank)
        self._sites = sites
        self._is_elsewhere = is_elsewhere
        self._places = {name: place for place, site in enumerate(sites) for name in site.outputs}

    def fit(self, adapter: PeftAdapter) -> HostAdapter:
        """Check an adapter against the model and copy it out of its file. Any one thread may, while steps run."""
        joined: dict[int, dict[str, LowRank]] = {}
        for name, pair in adapter.layers.items():
            if self._is_elsewhere(name):
                continue
            place = self._places.get(name)
            if place is None:
                raise ModelUnsupported(
                    f"the adapter {adapter.path} adapts {name}, which is no linear layer of this model that can be"
                )
            shape, own = (pair.b.values.shape[0], pair.a.values.shape[1]), self._sites[place].shape(name)
            if shape != own:
                raise ModelUnsupported(
                    f"the adapter {adapter.path} is for another model: its {name} is {list(shape)}, and this "
                    f"model's is {list(own)}"
                )
            joined.setdefault(place, {})[name] = pair
        pairs = {place: _host_pair(self._sites[place], found) for place, found in joined.items()}
        return HostAdapter(adapter.digest, self.slots.prepared(pairs), adapter.num_bytes, adapter.rank)

    def place(self, slot: int, adapter: HostAdapter) -> None:
        """Put it on the device; what lay in the slot is gone. Call it between steps only."""
        self.slots.place(slot, adapter.prepared)

    def clear(self, slot: int) -> None:
        self.slots.clear(slot)


@dataclass(frozen=True)
class AdaptedModel:
    """A model and the same model with adapters: which of the two runs is seen by the batch."""

    plain: CausalLM
    adapted: CausalLM
    bank: AdapterBank

    @property
    def config(self) -> ModelConfig:
        return self.plain.config

    @property
    def spec(self) -> AttentionSpec:
        return self.plain.spec

    def __call__(self, batch: Batch, kv: Sequence[LayerKV]) -> Tensor:
        if not batch.adapters and batch.slots is None:
            return self.plain(batch, kv)
        self.bank.slots.begin(batch)
        return self.adapted(batch, kv)


def with_adapters(
    model: CausalLM,
    sites: Sequence[Site],
    ops: Ops,
    num_slots: int,
    *,
    max_rank: int = MAX_RANK,
    stage: Stage = Stage(),  # noqa: B008 (frozen)
) -> AdaptedModel:
    """`sites`: the linear layers as the model was loaded with. Linears that are no field of its layers stay as they
    are, and no adapter may name them. `max_rank`: what a slot has room for, on devices where that is set aside.
    `stage`: the layers that were loaded; what an adapter adds to those of other stages is left to them."""
    found = _fields(model, {id(site.linear) for site in sites})
    reached = [site for site in sites if id(site.linear) in found]
    bank = AdapterBank(
        ops, reached, num_slots, max_rank, partial(stage.is_elsewhere, num_layers=model.config.num_layers)
    )
    linears = {id(site.linear): AdaptedLinear(site.linear, place, bank.slots) for place, site in enumerate(reached)}
    return AdaptedModel(model, _replaced(model, linears), bank)


def _fields(value: Any, wanted: set[int]) -> set[int]:
    """Ids of the wanted objects that lie below a value made of dataclasses and lists."""
    if id(value) in wanted:
        return {id(value)}
    return set().union(*(_fields(inner, wanted) for inner in _inner(value).values()))


def _replaced(value: T, linears: dict[int, AdaptedLinear]) -> T:
    """The same value with other linears below it. A value that has none is the same object."""
    if id(value) in linears:
        return linears[id(value)]  # type: ignore[return-value]
    inner = _inner(value)
    changed = {name: new for name, old in inner.items() if (new := _replaced(old, linears)) is not old}
    if not changed:
        return value
    if isinstance(value, list):
        return [changed.get(str(place), old) for place, old in enumerate(value)]  # type: ignore[return-value]
    return dataclasses.replace(value, **changed)  # type: ignore[type-var]


def _inner(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {str(place): item for place, item in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
    return {}


def _host_pair(site: Site, found: dict[str, LowRank]) -> HostPair:
    a: list[Tensor] = []
    parts: list[tuple[Tensor, float, int, int]] = []
    column, rank = 0, 0
    for name, size in site.outputs.items():
        pair = found.get(name)
        if pair is not None:
            own = site.parts.get(name)
            a.append(_copied(pair.a) if own is None else _copied(pair.a)[:, slice(*own[0].column_range)])
            b = _copied(pair.b) if own is None else torch.cat([_copied(pair.b)[part.rows] for part in own])
            if site.order is not None:
                order = site.order[column : column + size].cpu() - column
                assert 0 <= order.min() <= order.max() < size, "an order keeps projections apart"
                b = b[order]
            parts.append((b, pair.scale, rank, column))
            rank += pair.rank
        column += size
    return HostPair(torch.cat([each.float() for each in a]) if len({x.dtype for x in a}) > 1 else torch.cat(a), parts)


def _copied(stored: StoredTensor) -> Tensor:
    """Copy out of the mapped file, whose directory may be gone tomorrow."""
    return torch.from_numpy(stored.values.copy()).view(DTYPES[stored.format])
