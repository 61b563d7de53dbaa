"""The Kubernetes driver's contract on the fake API server, and what only a fake can be made to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fake_kubernetes import FakeKubernetes, fake_kubernetes, write_kubeconfig
from tests.fleet.drivers.kubernetes_contract import *  # noqa: F403


class FakeCluster:
    def __init__(self, server: FakeKubernetes, kubeconfig: Path) -> None:
        self.server = server
        self.kubeconfig = kubeconfig
        self.namespace = "models"
        self.go_down, self.come_up = server.go_down, server.come_up
        self.drop_watches, self.forget_history = server.drop_watches, server.forget_history


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_kubernetes() as server:
        yield FakeCluster(server, write_kubeconfig(tmp_path / "kubeconfig", server.url, "models"))
