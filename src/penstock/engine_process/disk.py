"""The disk below the host's KV blocks: whether settings allow it, and where an engine's files are."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.home import penstock_home

if TYPE_CHECKING:
    from penstock.runner.assembly import Assembly
    from penstock.runner.disk_store import DiskStore

_GIB = 1 << 30
_READY_S = 1.0  # for the list of files, at the start; a longer one is read beside the first steps


def check_disk(settings: EngineSettings, num_ranks: int = 1) -> None:
    """Raise for settings with which no block would ever come to the disk."""
    if settings.disk_kv_gib is None:
        return
    problem = ""
    if settings.host_kv_gib is None:
        problem = "needs host_kv_gib too: blocks come to the disk and back through host memory; 1 is enough to try it"
    elif not settings.prefix_cache:
        problem = "keeps blocks for prompts that begin alike, which prefix_cache: false forbids; set one of them"
    elif num_ranks > 1:
        problem = (
            f"is for a model on one rank, and this one has {num_ranks}, each with a part of every block; "
            "leave it out, and use host_kv_gib alone"
        )
    if problem:
        raise ConfigError(f"disk_kv_gib {problem}", param="disk_kv_gib")


def open_disk(assembly: Assembly, checkpoint: Checkpoint, settings: EngineSettings) -> DiskStore | None:
    """None: there is to be no disk."""
    if settings.disk_kv_gib is None or assembly.host is None:
        return None
    from penstock.model.ops.packed_cache import files_identity
    from penstock.runner.disk_store import DiskLimits, DiskStore

    files = files_identity(checkpoint.path) if checkpoint.path.exists() else "random"
    layout = blake2b(f"{files}\n{assembly.kv_layout}".encode(), digest_size=16, person=b"penstock.kv").digest()
    path = Path(settings.disk_kv_path).expanduser() if settings.disk_kv_path else penstock_home() / "kv"
    limits = DiskLimits(int(settings.disk_kv_gib * _GIB), settings.disk_kv_age_s)
    store = DiskStore(path, layout, assembly.host, limits)
    store.wait_ready(_READY_S)
    return store
