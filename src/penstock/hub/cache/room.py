"""Size of the cache: the limit, and which models go when another needs the room. Reads no disk."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from penstock.core.errors import ConfigError, ModelMissing

LIMIT = "PENSTOCK_MODELS_LIMIT"
DEFAULT_LIMIT = "80%"
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B|B|)", re.IGNORECASE)


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as `penstock serve` takes it
    place: str  # in the cache; empty: a file of the user's
    path: Path
    num_bytes: int
    state: Literal["complete", "partial"] = "complete"
    is_in_use: bool = False  # by a process that runs: it serves the model, or fetches it
    pinned: bool = False
    last_used_at: float | None = None
    fetched_at: float | None = None
    fetch_s: float | None = None
    fetched_bytes: int | None = None
    verified_at: float | None = None
    revision: str | None = None


def limit_bytes(text: str, disk_bytes: int) -> int:
    """ "200GB", "1.5TiB", or a share of the disk: "80%"."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{LIMIT} is {text!r}; give a size such as 200GB, or a share of the disk such as 80%")
    number, unit = float(found[1]), found[2]
    if unit == "%":
        return int(disk_bytes * min(number, 100.0) / 100)
    (factor,) = (factor for name, factor in _UNITS.items() if name.lower() == unit.lower())
    return int(number * factor)


class Need(NamedTuple):
    model_bytes: int  # what the cache will hold of the model
    disk_bytes: int  # what is still to be written, with what is only needed while it is fetched


def to_remove(models: Sequence[CachedModel], need: Need, *, limit: int, free_bytes: int) -> list[CachedModel]:
    """Models that go so that another has room, the least recently used first; none that is pinned or in use. Raises
    where that would not be enough."""
    used = sum(model.num_bytes for model in models)
    excess = max(used + need.model_bytes - limit, need.disk_bytes - free_bytes)
    removable = sorted(
        (model for model in models if not model.pinned and not model.is_in_use),
        key=lambda model: model.last_used_at or 0.0,
    )
    if excess > (gain := sum(model.num_bytes for model in removable)):
        if need.disk_bytes - free_bytes > gain:
            said = f"{size(need.disk_bytes)} are needed and {size(free_bytes)} are free"
            raise OSError(
                errno.ENOSPC, f"{said}, beside {size(gain)} that removing models would free" if gain else said
            )
        raise ModelMissing(
            f"the cache's limit is {size(limit)}: the model has {size(need.model_bytes)}, and models of "
            f"{size(used - gain)} are pinned or in use; unpin or stop some, or set {LIMIT} higher"
        )
    chosen: list[CachedModel] = []
    for model in removable:
        if excess <= 0:
            break
        chosen.append(model)
        excess -= model.num_bytes
    return chosen


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
