"""A real control plane with four nodes in two zones, shared by all tests; each file has a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tools.drills.stand import write_model
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.cluster import cluster as open_cluster
from tools.kubernetes.control_plane import is_possible
from tools.kubernetes.install import missing
from tools.kubernetes.postgres import Postgres, postgres

from penstock.tenancy.store import open_store
from tests.kubernetes.namespaces import Namespace, until
from tests.kubernetes.releases import Release

ZONES = {"east-1": "east", "east-2": "east", "west-1": "west", "west-2": "west"}
_numbers = itertools.count(1)


def skip_unless_possible() -> None:
    if names := missing():
        pytest.skip(f"{', '.join(names)} not installed: make test-kubernetes")
    if not is_possible():
        pytest.skip("the node agent needs root: namespaces and mounts")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    skip_unless_possible()
    with open_cluster(tmp_path_factory.mktemp("kubernetes")) as found:
        for name, zone in ZONES.items():
            found.add_node(name, zone)
        yield found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model whose weights are made up, in a penstock home."""
    models = tmp_path_factory.mktemp("home") / "models"
    models.mkdir()
    return write_model(models / "tiny", 1 << 16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ns(cluster: Cluster) -> AsyncIterator[Namespace]:
    """A fresh one; what is in it is deleted afterwards."""
    async with cluster.api() as api:
        name = f"test-{next(_numbers)}"
        await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        found = Namespace(api, name)

        async def account() -> bool:
            assert cluster.plane.dead() == {}
            return bool((await found.get("ServiceAccount", "default") or {}).get("secrets"))

        await until(account)  # else no pod is admitted
        yield found
        await api.delete(f"/api/v1/namespaces/{name}")
        await until(found.pods, lambda pods: not pods)


@pytest.fixture(scope="session")
def database(cluster: Cluster) -> Iterator[Postgres]:
    with postgres(cluster.plane.network.address(0, 3)) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(cluster: Cluster, ns: Namespace, database: Postgres, model: Path) -> AsyncIterator[Release]:
    """A namespace for the chart, with a store of its own."""
    name = ns.name.replace("-", "_")
    database.create(name)
    with open_store(database.url(name)) as store:
        yield Release(cluster, ns, store, model, database.url(name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    found = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and isinstance(found, Cluster):
        report.sections.append(("logs of the cluster", found.logs()))
    return report
