"""Manifests of the Prometheus operator's and KEDA's kinds, checked by the schemas of npm's @kubernetes-models."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.helm import cached_models

from tests.deploy.chart import Manifest, manifests, needs_helm

KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject")
pytestmark = [
    needs_helm,
    pytest.mark.skipif(
        shutil.which("node") is None or not cached_models().exists(),
        reason="there are no schemas of custom resources here: python -m tools.helm --fetch",
    ),
]


def complaints(found: Sequence[Manifest]) -> list[str]:
    command = ["node", Path(__file__).with_name("custom_resources.mjs"), cached_models()]
    done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=True)
    verdicts: list[str] = json.loads(done.stdout)
    return verdicts


def test_their_schemas_accept_them() -> None:
    found = [one for name in ("gpu", "keda", "public") for one in manifests(name) if one["kind"] in KINDS]
    assert {one["kind"] for one in found} == set(KINDS)
    broken = copy.deepcopy(next(one for one in found if one["kind"] == "ScaledObject"))
    broken["spec"]["triggers"][0].pop("type")
    *verdicts, of_the_broken = complaints([*found, broken])
    assert verdicts == [""] * len(found)
    assert "type" in of_the_broken
