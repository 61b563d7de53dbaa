"""The Kubernetes driver's contract on a real API server. No node agent runs there: the contract plays it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tools.kubernetes.api import Api
from tools.kubernetes.control_plane import TOKEN, ControlPlane, control_plane

from tests.fleet.drivers.kubernetes_contract import *  # noqa: F403
from tests.kubernetes.conftest import skip_unless_possible

pytestmark = [pytest.mark.slow, pytest.mark.drill]
_numbers = itertools.count(1)


@dataclass
class RealCluster:
    plane: ControlPlane
    namespace: str

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig

    def go_down(self) -> None:
        self.plane.kill("kube-apiserver")

    def come_up(self) -> None:
        self.plane.start("kube-apiserver")

    def drop_watches(self) -> None:
        self.go_down()
        self.come_up()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    skip_unless_possible()
    # A new node is tainted as not ready, and a controller that does not run here would take that away.
    untainted = ["--disable-admission-plugins=TaintNodesByCondition"]
    parts = ("etcd", "kube-apiserver")
    with control_plane(tmp_path_factory.mktemp("contract"), *parts, api_flags=untainted) as found:
        yield found


@pytest.fixture
async def cluster(plane: ControlPlane) -> AsyncIterator[RealCluster]:
    name = f"contract-{next(_numbers)}"
    async with Api(plane.url, TOKEN) as api:
        await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        # The controller manager would make it, and a token for it.
        account = {"metadata": {"name": "default"}, "automountServiceAccountToken": False}
        await api.create(f"/api/v1/namespaces/{name}/serviceaccounts", account)
        yield RealCluster(plane, name)
