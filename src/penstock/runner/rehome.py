"""Rehoming: the tensors that an object holds are moved into memory that can be parked, before anybody knows where they
are.

All tensors of one storage move together, so views stay views. A moved storage is freed at once, a gibibyte at a time:
the device never holds two copies of a model. Objects of a class with `stays_in_place` keep theirs: other processes have
mapped that memory.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from penstock.runner.virtual_memory import Keep, VirtualMemory

_BATCH_BYTES = 1 << 30
_ALIGNMENT = 512  # as torch's own allocator has it
_PLAIN = (str, bytes, int, float, bool, type(None), type, types.ModuleType, torch.device, torch.dtype)


def tensors_of(*roots: object) -> Iterator[Tensor]:
    """All tensors that can be reached from these objects: through attributes, containers and what functions close over.
    Each once."""
    seen: set[int] = set()
    left = list(roots)
    while left:
        found = left.pop()
        if isinstance(found, _PLAIN) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        else:
            left.extend(_held_by(found))


def _held_by(found: object) -> Iterable[object]:
    if getattr(type(found), "stays_in_place", False):
        return ()
    if isinstance(found, dict):
        return [*found.keys(), *found.values()]
    if isinstance(found, list | tuple | set | frozenset):
        return list(found)
    if isinstance(found, functools.partial):
        return [found.func, found.args, found.keywords]
    if isinstance(found, types.MethodType):
        return [found.__self__]
    if isinstance(found, types.FunctionType):
        return _closed_over(found)
    slots = [name for kind in type(found).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    return [*getattr(found, "__dict__", {}).values(), *(getattr(found, name, None) for name in slots)]


def _closed_over(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots


@torch.inference_mode(False)
@torch.no_grad()
def rehome(memory: VirtualMemory, tensors: Iterable[Tensor], keep: Keep, device: torch.device) -> int:
    """Move those of the tensors that lie on the device, and have not been moved before. Returns their bytes."""
    storages: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if tensor.device.type == device.type and tensor.untyped_storage().nbytes() and not memory.holds(address):
            storages.setdefault(address, []).append(tensor)
    batch: list[list[Tensor]] = []
    num_bytes = moved_bytes = 0
    while storages:
        _, sharing = storages.popitem()
        batch.append(sharing)
        num_bytes += _room(sharing[0])
        if num_bytes >= _BATCH_BYTES or not storages:
            _move(memory, batch, num_bytes, keep)
            moved_bytes += num_bytes
            batch, num_bytes = [], 0
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
    return moved_bytes


def _room(tensor: Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT


def _move(memory: VirtualMemory, batch: list[list[Tensor]], num_bytes: int, keep: Keep) -> None:
    room = memory.allocate(num_bytes, keep)
    begin = 0
    for sharing in batch:
        storage = sharing[0].untyped_storage()
        old = torch.empty(0, dtype=torch.uint8, device=sharing[0].device).set_(storage)
        room[begin : begin + old.nbytes].copy_(old)
        del old, storage
        step = _room(sharing[0])
        for tensor in sharing:
            first = (begin + tensor.storage_offset() * tensor.itemsize) // tensor.itemsize
            with torch.inference_mode(tensor.is_inference()):  # it stays what it is
                tensor.set_(room.untyped_storage(), first, tensor.size(), tensor.stride())
        begin += step
