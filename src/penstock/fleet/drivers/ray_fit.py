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


def have_room(bundles: Sequence[Mapping[str, float]], nodes: Sequence[NodeView]) -> bool:
    """Whether there is a node for each bundle that has so much at all, in use or not."""
    left = [node for node in nodes if node.is_usable]
    for bundle in sorted(bundles, key=lambda one: -sum(one.values())):  # the largest has the least choice
        found = next((node for node in left if fits(bundle, node)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def shown_all(bundles: Sequence[Mapping[str, float]]) -> str:
    """Bundles of a replica, in words."""
    if len(bundles) == 1:
        return shown(bundles[0])
    if all(bundle == bundles[0] for bundle in bundles):
        return f"{shown(bundles[0])} on each of {len(bundles)} nodes"
    return "; ".join(f"{shown(bundle)} on node {node}" for node, bundle in enumerate(bundles))


def explain_lack(bundles: Sequence[Mapping[str, float]], nodes: Sequence[NodeView]) -> str:
    """Returns why a replica has no place, and what would."""
    if len(bundles) == 1:
        return _explain_one(bundles[0], nodes)
    if have_room(bundles, nodes):
        return "the nodes that have so much are full"
    usable = [node for node in nodes if node.is_usable]
    for bundle in bundles:
        if usable and not (fitting := [node for node in usable if fits(bundle, node)]):
            return f"no node has {shown(bundle)}: more `nodes` need less of each, or add nodes with so much"
        if usable and len(fitting) < len(bundles):
            have = "1 node has" if len(fitting) == 1 else f"{len(fitting)} nodes have"
            return (
                f"a replica is on {len(bundles)} nodes, and {have} {shown(bundle)}: add {len(bundles) - len(fitting)}"
            )
    return "no node is alive and takes new work"


def _explain_one(bundle: Mapping[str, float], nodes: Sequence[NodeView]) -> str:
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
