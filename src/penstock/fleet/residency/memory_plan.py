"""One device's memory among the models that are loaded on it together: numbers in, bytes for each model out.

    device = fixed of each model (weights, largest step, process) + KV cache of each model
    KV cache of a model = its floor, which it always has + what it is lent of the rest, by shares

A model that is loaded while others are not is lent memory only beyond the floors of those that fit beside it,
whichever of them comes next: so a loan keeps no model out that there would be room for. It is returned when the model
leaves the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from penstock.core.residency import why_no_room


class ModelNeeds(Struct, frozen=True):
    """Memory that one model needs on the device. Bytes."""

    name: str
    fixed_bytes: int  # weights, what the largest step works in, and the process
    floor_bytes: int  # of KV cache, at least
    most_bytes: int  # of KV cache that it could use at all; not below the floor
    share: float = 1.0  # of what floors leave, by comparison with other models' shares
    parked_bytes: int = 0  # that stay on the device while it is parked

    @property
    def least_bytes(self) -> int:
        return self.fixed_bytes + self.floor_bytes


class Allotment(NamedTuple):
    """Memory of one model. Bytes."""

    fixed_bytes: int
    floor_bytes: int
    lent_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.floor_bytes + self.lent_bytes

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes


def allot(device_bytes: int, together: Sequence[ModelNeeds]) -> dict[str, Allotment] | None:
    """Memory of models that are loaded together; None: they do not fit. What floors leave is lent by shares, to each
    model no more than it could use."""
    spare_bytes = device_bytes - sum(model.least_bytes for model in together)
    if spare_bytes < 0:
        return None
    lent, borrowers = dict.fromkeys((model.name for model in together), 0), list(together)
    while borrowers:  # those that a share gives more than they can use have it all; the others share what that leaves
        left_bytes = spare_bytes - sum(lent.values())
        total = sum(model.share for model in borrowers)
        portions = {model.name: int(left_bytes * (model.share / total)) for model in borrowers}
        full = [model for model in borrowers if model.most_bytes - model.floor_bytes <= portions[model.name]]
        if not full:
            lent |= portions
            break
        lent |= {model.name: model.most_bytes - model.floor_bytes for model in full}
        borrowers = [model for model in borrowers if model not in full]
    return {model.name: Allotment(model.fixed_bytes, model.floor_bytes, lent[model.name]) for model in together}


def beside(device_bytes: int, loaded: Iterable[ModelNeeds], others: Iterable[ModelNeeds]) -> list[ModelNeeds]:
    """The loaded models, and of the others, in this order, those that there is still room for beside them."""
    found = [*loaded]
    left_bytes = device_bytes - sum(model.least_bytes for model in found)
    for model in others:
        if model.least_bytes <= left_bytes:
            found.append(model)
            left_bytes -= model.least_bytes
    return found


def kv_bytes_at_start(
    device_bytes: int,
    taken_bytes: int,
    starting: ModelNeeds,
    pinned: Sequence[ModelNeeds],
    others: Sequence[ModelNeeds],
) -> int:
    """KV cache of a model that is started now. `taken_bytes`: what others hold of the device at this moment; `pinned`:
    those that stay. What it is lent stays within what is free, and whichever of the others is loaded next, there is
    room for it if there would be without the loan."""
    room_bytes = device_bytes - taken_bytes - starting.fixed_bytes
    assert room_bytes >= starting.floor_bytes, f"{starting.name} was started without room"
    kv_bytes = min(room_bytes, starting.most_bytes)
    for first in others or [starting]:
        rest = [model for model in others if model is not first]
        planned = allot(device_bytes, beside(device_bytes, [starting, *pinned], [first, *rest] if others else []))
        if planned is not None:
            kv_bytes = min(kv_bytes, planned[starting.name].kv_bytes)
    return max(starting.floor_bytes, kv_bytes)


def refusal(device_bytes: int, wanted: ModelNeeds, staying: Mapping[str, int]) -> str:
    """Returns why a model cannot be loaded while those in `staying` hold so many bytes each; empty: it can."""
    return why_no_room(wanted.name, wanted.fixed_bytes, wanted.floor_bytes, device_bytes, staying)
