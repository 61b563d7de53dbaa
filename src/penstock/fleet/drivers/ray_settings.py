"""Settings of replicas as actors of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.settings import Count, setting
from penstock.core.slo import Seconds


@dataclass(frozen=True)
class RaySettings:
    """Every actor of the fleet; a pool may have some of them otherwise."""

    namespace: str = setting("penstock", "of the actors and placement groups")
    nodes: Count | None = setting(
        None,
        "nodes of one replica; auto: `nnodes` of its engine, else as few as have its GPUs, if tp and pp can be spread",
    )
    cpus: Annotated[float, Meta(ge=0)] | None = setting(
        None,
        "that each replica reserves, on each of its nodes; auto: as many as the threads of its ranks, or 1 beside GPUs",
    )
    resources: dict[str, float] = setting({}, "that it reserves there besides, as in accelerator_type:H100: 0.001")
    zone_prefix: str = setting("zone:", "a node in zone a has the resource zone:a; replicas of that zone need it")
    capacity_prefix: str = setting(
        "", "the same for resources that mark nodes as spot or on_demand; none: any node will do for both"
    )
    place_timeout_s: Seconds = setting(
        15.0, "a replica for which Ray has no room for so long is refused; less than `driver_timeout_s`"
    )
    runtime_env: dict[str, Any] = setting({}, "Ray's runtime environment of the actors: env_vars, working_dir, …")

    def of_pool(self, name: str, own: dict[str, Any]) -> RaySettings:
        """These, with a pool's own over them. Raises ConfigError."""
        where = f"pools.{name}.ray."
        if "namespace" in own:
            raise ConfigError("a fleet's actors are in one namespace", param=f"{where}namespace")
        built = build(RaySettings, own, where=where)
        return replace(self, **{key: getattr(built, key) for key in own})
