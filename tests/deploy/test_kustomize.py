"""The kustomize base: made of the chart as it is, and kubectl builds it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tools import helm
from tools.kustomize import write_base

from tests.deploy.chart import needs_helm

KUBECTL = shutil.which("kubectl")


@needs_helm
def test_the_base_is_what_the_chart_renders(tmp_path: Path) -> None:
    write_base(helm.render_for_kustomize(), tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.yaml")}
    kept = {path.relative_to(helm.BASE): path.read_text() for path in helm.BASE.rglob("*.yaml")}
    assert made == kept


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl here")
def test_kubectl_builds_it_and_pods_use_the_configuration_by_its_hash() -> None:
    built = subprocess.run([str(KUBECTL), "kustomize", helm.BASE], capture_output=True, text=True, check=True).stdout
    found = list(yaml.safe_load_all(built))
    assert {one["metadata"].get("namespace") for one in found} == {"penstock", None}
    names = {one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"}
    assert {name.rsplit("-", 1)[0] for name in names} == {"penstock-fleet", "penstock-gateway"}
    used = {
        volume["configMap"]["name"]
        for one in found
        if one["kind"] == "Deployment"
        for volume in one["spec"]["template"]["spec"]["volumes"]
        if "configMap" in volume
    }
    assert used == names
