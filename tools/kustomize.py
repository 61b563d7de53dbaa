"""The kustomize base: the chart's manifests without what only Helm needs.

Configuration files are files of their own, which kustomize makes ConfigMaps of: a changed one gets another name, so
that its pods are started anew.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

HEAD = "# Written by `python -m tools.helm` from deploy/helm/penstock. Do not edit: lay patches over it.\n"
_SOURCE = re.compile(r"^# Source: penstock/templates/(.+)$", re.MULTILINE)
_OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by")


def write_base(manifests: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "config").mkdir(parents=True)
    files: dict[str, list[Any]] = {}
    generators = []
    for text in re.split(r"^---\n", manifests, flags=re.MULTILINE):
        source, manifest = _SOURCE.search(text), yaml.safe_load(text)
        if source is None or manifest is None:
            continue
        if manifest["kind"] == "ConfigMap":
            for name, content in manifest["data"].items():
                (folder / "config" / name).write_text(HEAD + content)
            paths = [f"config/{name}" for name in manifest["data"]]
            generators.append({"name": manifest["metadata"]["name"], "files": paths})
        else:
            files.setdefault(source[1], []).append(_without_helm(manifest))
    for name, found in files.items():
        (folder / name).write_text(HEAD + yaml.safe_dump_all(found, sort_keys=False, width=120))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "penstock",
        "resources": sorted(files),
        "configMapGenerator": generators,
    }
    (folder / "kustomization.yaml").write_text(HEAD + yaml.safe_dump(kustomization, sort_keys=False))


def _without_helm(manifest: dict[str, Any]) -> dict[str, Any]:
    for label in _OF_HELM:
        manifest["metadata"]["labels"].pop(label)
    pod = manifest["spec"]["template"]["metadata"] if manifest["kind"] == "Deployment" else {}
    annotations = pod.get("annotations", {})
    annotations.pop("checksum/config", None)
    if not annotations:
        pod.pop("annotations", None)
    return manifest
