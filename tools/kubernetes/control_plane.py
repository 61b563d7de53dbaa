"""A real Kubernetes control plane on loopback addresses of its own: etcd, API server, controller manager, scheduler.

    with control_plane(directory) as plane:
        ...  # KUBECONFIG=plane.kubeconfig

Each part can be killed and started again at the same address. All end with the process that started them, however that
ends; they must be started by its main thread, whose end is what the kernel's parent-death signal tells.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.waiting import eventually
from tools.kubernetes.install import find

PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
TOKEN = "admin-token"
_PATIENCE_S = 120.0
_UNREACHABLE_S = 40  # without a heartbeat, until a node counts as lost; more than an API server takes to start
_TOLERATED_S = 2  # on a lost node, until its pods are deleted; Kubernetes waits 300 s


class LoopbackNetwork:
    """A /16 of the loopback network that belongs to one cluster: 127.N.0.0. No port there is anybody else's."""

    def __init__(self) -> None:
        for number in random.sample(range(64, 254), 190):
            claim = socket.socket()
            with contextlib.suppress(OSError):
                claim.bind((f"127.{number}.0.1", 10_000))
                self.number, self._claim = number, claim  # bound as long as the cluster lives
                return
            claim.close()
        raise RuntimeError("190 clusters run already")

    def address(self, node: int, host: int) -> str:
        return f"127.{self.number}.{node}.{host}"

    def close(self) -> None:
        self._claim.close()


class ControlPlane:
    def __init__(self, directory: Path, api_flags: Sequence[str]) -> None:
        self.directory = directory
        self.network = LoopbackNetwork()
        host = self.network.address(0, 2)
        self.url = f"https://{host}:6443"
        self.kubeconfig = directory / "kubeconfig"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._write_files()
        self._commands = self._make_commands(host, api_flags)

    def start(self, *parts: str) -> None:
        """Starts these parts, and waits for the API server before those that need it."""
        for part in PARTS:
            if part not in parts:
                continue
            with open(self.directory / f"{part}.log", "ab") as log:
                command = ["setpriv", "--pdeathsig", "KILL", *self._commands[part]]
                self._processes[part] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            if part == "kube-apiserver":
                self.wait_until_ready()

    def kill(self, part: str) -> None:
        process = self._processes.pop(part)
        process.kill()
        process.wait()

    @contextlib.contextmanager
    def without(self, part: str) -> Iterator[None]:
        """This part is dead meanwhile."""
        self.kill(part)
        try:
            yield
        finally:
            self.start(part)

    def dead(self) -> dict[str, str]:
        """Parts that have ended by themselves, with their last words."""
        ended = [part for part, process in self._processes.items() if process.poll() is not None]
        return {part: (self.directory / f"{part}.log").read_text()[-1000:] for part in ended}

    def is_ready(self) -> bool:
        request = urllib.request.Request(f"{self.url}/readyz", headers={"authorization": f"Bearer {TOKEN}"})
        unverified = ssl._create_unverified_context()
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5, context=unverified) as answer:
            return bool(answer.read() == b"ok")
        return False

    def wait_until_ready(self) -> None:
        server = self._processes["kube-apiserver"]
        eventually(lambda: server.poll() is not None or self.is_ready(), within_s=_PATIENCE_S)
        if server.poll() is not None:
            raise RuntimeError((self.directory / "kube-apiserver.log").read_text()[-2000:])

    def close(self) -> None:
        for part in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            if part in self._processes:
                self.kill(part)
        self.network.close()

    def _write_files(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        quiet = {"cwd": self.directory, "check": True, "capture_output": True}
        subprocess.run(["openssl", "genrsa", "-out", "accounts.key", "2048"], **quiet)
        subprocess.run(["openssl", "rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub"], **quiet)
        (self.directory / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))  # which is YAML too

    def _make_commands(self, host: str, api_flags: Sequence[str]) -> dict[str, list[str]]:
        at = self.directory
        store, peers = f"http://{host}:2379", f"http://{host}:2380"
        client = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", f"--cert-dir={at}/certs"]
        client += ["--secure-port=0", "--port=0"]  # nobody asks them anything
        flags = {
            "etcd": [
                f"--data-dir={at}/etcd",
                f"--listen-client-urls={store}",
                f"--advertise-client-urls={store}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
                "--unsafe-no-fsync",
            ],
            "kube-apiserver": [
                f"--etcd-servers={store}",
                f"--bind-address={host}",
                "--secure-port=6443",
                "--insecure-port=0",
                f"--cert-dir={at}/certs",
                f"--token-auth-file={at}/tokens.csv",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.0.0.0/16",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={at}/accounts.pub",
                f"--service-account-signing-key-file={at}/accounts.key",
                f"--default-not-ready-toleration-seconds={_TOLERATED_S}",
                f"--default-unreachable-toleration-seconds={_TOLERATED_S}",
                *api_flags,
            ],
            "kube-controller-manager": [
                *client,
                f"--service-account-private-key-file={at}/accounts.key",
                f"--root-ca-file={at}/certs/apiserver.crt",
                "--use-service-account-credentials=false",
                "--node-monitor-period=1s",
                f"--node-monitor-grace-period={_UNREACHABLE_S}s",
                "--node-eviction-rate=100",
                "--secondary-node-eviction-rate=100",
                "--large-cluster-size-threshold=0",
                "--horizontal-pod-autoscaler-sync-period=2s",
                "--horizontal-pod-autoscaler-downscale-stabilization=10s",
                "--controllers=*,-cloud-node-lifecycle,-ttl",
            ],
            "kube-scheduler": client,
        }
        return {part: [_program(part), *flags[part]] for part in PARTS}


def _program(name: str) -> str:
    found = find(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: make test-kubernetes")
    return found


@contextlib.contextmanager
def control_plane(directory: Path, *parts: str, api_flags: Sequence[str] = ()) -> Iterator[ControlPlane]:
    """`parts`: some of them; all if none is named. `api_flags`: more for the API server."""
    plane = ControlPlane(directory, api_flags)
    try:
        plane.start(*(parts or PARTS))
        yield plane
    finally:
        plane.close()


def is_possible() -> bool:
    """Whether this user may give processes namespaces and mounts of their own, as the node agent does."""
    probe = ["unshare", "--mount", "--pid", "--uts", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0
