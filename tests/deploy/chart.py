"""The Helm chart, rendered once for each combination of values that people use."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.helm import CHART, NEWEST, find_helm, render

Manifest = dict[str, Any]

VALUES: dict[str, Path | None] = {"default": None} | {
    path.name.removesuffix("-values.yaml"): path for path in sorted(CHART.glob("ci/*-values.yaml"))
}
needs_helm = pytest.mark.skipif(find_helm() is None, reason="there is no helm here: python -m tools.helm --fetch")


@cache
def manifests(name: str, kube_version: str = NEWEST) -> tuple[Manifest, ...]:
    path = VALUES[name]
    text = render("--namespace", "serving", *(["--values", path] if path else []), kube_version=kube_version)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(one for one in yaml.load_all(text, loader) if one is not None)


def refusal(*settings: str) -> str:
    """Returns what helm says when it refuses these values, each `key=value`."""
    with pytest.raises(subprocess.CalledProcessError) as found:
        render(*(word for one in settings for word in ("--set", one)))
    return str(found.value.stderr)


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    """Manifests by their names."""
    return {one["metadata"]["name"]: one for one in manifests(name) if one["kind"] == kind}


def pods(name: str) -> dict[str, Manifest]:
    """The pod template of every Deployment, by its name."""
    return {key: one["spec"]["template"] for key, one in of_kind(name, "Deployment").items()}


def config_files(name: str) -> dict[str, str]:
    """Configuration files by ConfigMap and file, `penstock-gateway/gateway.yaml`."""
    found = of_kind(name, "ConfigMap")
    return {f"{key}/{file}": text for key, one in found.items() for file, text in one["data"].items()}
