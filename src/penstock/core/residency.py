"""Models that come to a device and leave it: the states they are in, what an operator may order of them, and whether
there is room for one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

_GIB = 1 << 30


class Residence(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"  # takes no new requests; its streams go on
    LEAVING = "leaving"  # parks, or ends
    PARKED = "parked"
    WAKING = "waking"


class Wish(StrEnum):
    """An operator's order for one model. A load, a warm-up and a park are over once they are done."""

    NONE = ""  # as the requests need it
    LOAD = "load"
    UNLOAD = "unload"  # and is not loaded again before another order
    PARK = "park"
    WARM_UP = "warm-up"  # loaded, and a token computed


def why_no_room(name: str, fixed_bytes: int, floor_bytes: int, device_bytes: int, staying: Mapping[str, int]) -> str:
    """Reason why a model cannot be loaded beside those in `staying`, with the bytes that each holds; empty: it can."""
    least_bytes, left_bytes = fixed_bytes + floor_bytes, device_bytes - sum(staying.values())
    if least_bytes <= left_bytes:
        return ""
    needs = f"{name} needs {gib(least_bytes)}: {gib(fixed_bytes)} for its weights, steps and process"
    if floor_bytes:
        needs += f", and {gib(floor_bytes)} for its smallest KV cache"
    has = f"the device has {gib(device_bytes)} for models"
    if staying:
        taken = ", ".join(f"{gib(held_bytes)} by {other}" for other, held_bytes in staying.items())
        has += f", of which {gib(sum(staying.values()))} are taken ({taken}) and {gib(max(0, left_bytes))} are left"
    return f"{needs}; {has}: {gib(least_bytes - max(0, left_bytes))} too little"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
