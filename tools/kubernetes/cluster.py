"""A whole test cluster: the control plane and its nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.kubernetes.api import Api
from tools.kubernetes.control_plane import TOKEN, ControlPlane, control_plane
from tools.kubernetes.install import find
from tools.kubernetes.node_agent import Node, NodeSettings


class Cluster:
    def __init__(self, directory: Path, plane: ControlPlane) -> None:
        self._directory = directory
        self.plane = plane
        self.nodes: dict[str, Node] = {}

    def add_node(self, name: str, zone: str, *, gpus: int = 8, labels: Mapping[str, str] | None = None) -> Node:
        settings = NodeSettings(
            url=self.plane.url,
            token=TOKEN,
            directory=str(self._directory / name),
            network=self.plane.network.number,
            number=len(self.nodes) + 1,
            name=name,
            zone=zone,
            gpus=gpus,
            labels=dict(labels or {}),
        )
        node = self.nodes[name] = Node(settings)
        node.start()
        return node

    def api(self) -> Api:
        """Returns a client of the API, to be entered in the event loop that uses it."""
        return Api(self.plane.url, TOKEN)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self._run("kubectl", "--kubeconfig", str(self.plane.kubeconfig), *words, stdin=stdin)

    def helm(self, *words: str) -> str:
        return self._run("helm", *words)

    def logs(self) -> str:
        """The ends of what all nodes and pods wrote."""
        return "".join(
            f"=== {name}: {path}\n{text}\n" for name, node in self.nodes.items() for path, text in node.logs()
        )

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def _run(self, program: str, *words: str, stdin: str | None = None) -> str:
        path = find(program)
        if path is None:
            raise FileNotFoundError(f"{program} is not installed: make test-kubernetes")
        done = subprocess.run(
            [path, *words], input=stdin, capture_output=True, text=True, env=os.environ | {"HOME": str(self._directory)}
        )
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    with control_plane(directory / "control-plane") as plane:
        found = Cluster(directory, plane)
        try:
            yield found
        finally:
            found.close()
