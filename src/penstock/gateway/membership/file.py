"""The replicas that the gateway's YAML names."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.membership.member import Member
from penstock.gateway.settings.gateway import ModelSettings


def members_of(pools: Mapping[str, ModelSettings]) -> list[Member]:
    return [Member(name, url.rstrip("/"), pool) for name, pool in pools.items() for url in pool.replicas]
