"""Resources that a replica reserves on Ray: a bundle for each of its nodes, and how many nodes it has. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from penstock.core.errors import ConfigError
from penstock.core.nodes import NodeMap, spread_settings
from penstock.core.settings import EngineSettings
from penstock.fleet.drivers.driver import ReplicaSpec
from penstock.fleet.drivers.ray_cluster import NodeView
from penstock.fleet.drivers.ray_fit import have_room
from penstock.fleet.drivers.ray_settings import RaySettings

Bundle = Mapping[str, float]
_PLACE = 0.001  # of a resource that marks a place: many replicas share it


def bundles_for(spec: ReplicaSpec, settings: RaySettings, nodes: Sequence[NodeView]) -> list[Bundle]:
    """Bundles of a replica on this cluster. Where nobody says how many nodes it has, it has as few as have its GPUs;
    one, where no number of them does, or nobody says how many ranks it has. Raises ConfigError."""
    engine = spec.settings.engine
    if (told := told_nodes(engine, settings)) is not None:
        return bundles_of(spec, settings, told)
    most = max(1, spec.gpus) if engine.tp or engine.pp else 1
    for count in range(1, most + 1):
        with contextlib.suppress(ConfigError):
            found = bundles_of(spec, settings, count)
            if have_room(found, nodes):
                return found
    return bundles_of(spec, settings, 1)


def told_nodes(engine: EngineSettings, settings: RaySettings) -> int | None:
    """Nodes of a replica by its pool's settings; None: they do not say. Raises ConfigError."""
    if settings.nodes is not None and engine.nnodes not in (None, settings.nodes):
        raise ConfigError(f"nodes is {settings.nodes}, but nnodes of the engine is {engine.nnodes}", param="ray.nodes")
    return settings.nodes or engine.nnodes


def bundles_of(spec: ReplicaSpec, settings: RaySettings, num_nodes: int = 1) -> list[Bundle]:
    """A bundle for each of so many nodes, the first node's first. Raises ConfigError where ranks or GPUs cannot be
    shared out."""
    shares = gpu_shares(spec.settings.engine, spec.gpus, num_nodes)
    ranks = rank_map(spec.settings.engine, num_nodes).sizes
    return [_bundle(spec, settings, gpus, num_ranks) for gpus, num_ranks in zip(shares, ranks, strict=True)]


def rank_map(engine: EngineSettings, num_nodes: int) -> NodeMap:
    return spread_settings(engine, num_nodes, param="ray.nodes")


def gpu_shares(engine: EngineSettings, gpus: int, num_nodes: int) -> list[int]:
    """GPUs on each node, in proportion to its ranks. Raises ConfigError."""
    sizes = rank_map(engine, num_nodes).sizes
    if any(gpus * size % sum(sizes) for size in sizes):
        ranks = ", ".join(map(str, sizes))
        raise ConfigError(
            f"{gpus} GPUs cannot be shared out among {num_nodes} nodes that have {ranks} ranks: tp and pp are of as "
            "many ranks as there are GPUs",
            param="ray.nodes",
        )
    return [gpus * size // sum(sizes) for size in sizes]


def _bundle(spec: ReplicaSpec, settings: RaySettings, gpus: int, num_ranks: int) -> dict[str, float]:
    cpus = settings.cpus
    if cpus is None:
        cpus = 1.0 if gpus else float((spec.settings.engine.threads or 1) * num_ranks)
    bundle = {"CPU": cpus, "GPU": float(gpus), **settings.resources}
    if spec.zone:
        bundle[f"{settings.zone_prefix}{spec.zone}"] = _PLACE
    if settings.capacity_prefix:
        bundle[f"{settings.capacity_prefix}{spec.capacity_type}"] = _PLACE
    return {key: value for key, value in bundle.items() if value}
