"""A new version of a model rolled out by the chart on a real control plane: a canary, all of the traffic, and back."""

from __future__ import annotations

import asyncio

import pytest

from penstock.fleet.replica_client import ReplicaClient
from penstock.tenancy.routes import SharesAsked
from tests.kubernetes.namespaces import until
from tests.kubernetes.releases import POOL, REPLICA, SECRET, Release

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.asyncio(loop_scope="module")]

WEIGHTS = {POOL: {"versions": {"v1": {"weight": 100}, "v2": {"weight": 0}}}}


async def test_canary_is_promoted_and_rolled_back_without_a_broken_stream(release: Release) -> None:
    pools = [release.pool(min=1, max=1) | {"version": version} for version in ("v1", "v2")]
    await release.install(*pools, models=WEIGHTS)
    await release.settled(2)
    pods = (await release.ns.pods(**REPLICA)).values()
    assert {pod["metadata"]["labels"]["penstock.dev/version"] for pod in pods} == {"v1", "v2"}
    urls = {one.pool: one.url for one in (await release.active()).values()}
    client, routes = ReplicaClient(SECRET), release.store.routes

    async def asked(version: str) -> int:
        """Prompt tokens that the replica of a version has been asked, as it says itself."""
        report = await client.report(urls[f"{POOL}@{version}"])
        return report.measured.cache.prompt_tokens if report is not None else 0

    async def gets_traffic(version: str) -> None:
        before = await until(lambda: asked(version))
        await until(lambda: asked(version), lambda found: found > before)

    async with release.clients(4) as load:
        canary = await asked("v2")
        await until(lambda: asked("v1"), lambda found: found > canary)
        await asyncio.to_thread(routes.change, POOL, SharesAsked({"v1": 50, "v2": 50}))
        await gets_traffic("v2")
        await asyncio.to_thread(routes.promote, POOL, "v2")
        await release.answers(load, 8)
        await gets_traffic("v2")
        await asyncio.to_thread(routes.roll_back, POOL, 0)
        await gets_traffic("v1")
    client.close()
