"""The replicas that the gateway's YAML names."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.config import within
from penstock.gateway.membership.member import Member
from penstock.gateway.settings.gateway import ModelSettings


def members_of(pools: Mapping[str, ModelSettings]) -> list[Member]:
    return [
        Member(name, url.rstrip("/"), settings)
        for name, pool in pools.items()
        for url, settings in _entries(name, pool)
    ]


def _entries(name: str, pool: ModelSettings) -> list[tuple[str, ModelSettings]]:
    with within(f"models.{name.replace('@', '.versions.')}."):
        return pool.entries()
