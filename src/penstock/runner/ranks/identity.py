"""The identity that all nodes of a replica have in common, as each finds it on its own disk and command line."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from penstock.core.nodes import Nodes
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings
from penstock.hub.weights_identity import weights_identity
from penstock.runner.ranks.messages import GroupIdentity

if TYPE_CHECKING:
    from penstock.hub.resolve import ModelFiles

_FORMATS = ("dtype", "quant", "kv_dtype", "load")


def group_identity(
    files: ModelFiles, settings: EngineSettings, parallelism: Parallelism, nodes: Nodes
) -> GroupIdentity:
    if nodes.count == 1:
        return GroupIdentity(1, parallelism, {}, "", {}, {})  # nobody is asked
    config = hashlib.sha256(msgspec.json.encode(files.config, order="deterministic")).hexdigest()[:32]
    weights = weights_identity(files.path) if settings.load != "dummy" and files.path.exists() else {}
    formats = {name: str(getattr(settings, name)) for name in _FORMATS}
    asked = {name: value for name in ("tp", "pp", "ep", "sp") if (value := getattr(settings, name)) is not None}
    return GroupIdentity(nodes.count, parallelism, asked, config, weights, formats)
