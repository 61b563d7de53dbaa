"""Reasons why a Ray cluster has no node for a replica, in words that say what would work. Ray itself says none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.fleet.drivers.ray_cluster import NodeView

_AMOUNTS = ("CPU", "GPU")  # the others mark nodes: zones, capacity types, kinds of accelerators


def fits(bundle: Mapping[str, float], node: NodeView) -> bool:
    """Whether a node has so much at all, in use or not."""
    return all(node.resources.get(key, 0.0) >= value for key, value in bundle.items())


def shown(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in bundle.items())


def explain_lack(bundle: Mapping[str, float], nodes: Sequence[NodeView]) -> str:
    """Why a bundle has no place, and what would."""
    usable = [node for node in nodes if node.is_usable]
    if not usable:
        return "no node is alive and takes new work"
    if any(fits(bundle, node) for node in usable):
        return "the nodes that have so much are full"
    marks = {key: value for key, value in bundle.items() if key not in _AMOUNTS}
    marked = [node for node in usable if fits(marks, node)]
    if not marked:
        missing = [key for key, value in marks.items() if _most(key, usable) < value]
        if missing:
            return f"no node has the resource {' or '.join(missing)}: see `ray start --resources`"
        return f"no node has all of {', '.join(marks)}: see `ray start --resources`"
    where = f" of those with {', '.join(marks)}" if marks else ""
    if (gpus := bundle.get("GPU", 0.0)) > (most := _most("GPU", marked)):
        if not most:
            return f"no node{where} has GPUs: `gpus: 0` runs on CPUs"
        return (
            f"a replica is on one node, and none{where} has more than {most:g} GPUs: "
            f"`gpus: {most:g}` would fit, or add a node with {gpus:g}"
        )
    if (cpus := bundle.get("CPU", 0.0)) > (most := _most("CPU", marked)):
        return (
            f"a replica is on one node, and none{where} has more than {most:g} CPUs: "
            f"`ray: {{cpus: {most:g}}}` would fit, or add a node with {cpus:g}"
        )
    return f"no node{where} has its CPUs and its GPUs together"


def _most(key: str, nodes: Iterable[NodeView]) -> float:
    return max((node.resources.get(key, 0.0) for node in nodes), default=0.0)
