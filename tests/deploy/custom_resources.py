"""Validators of manifests whose kinds are not Kubernetes' own."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tools.helm import cached_models

from tests.deploy.chart import Manifest

CRD = Path(__file__).with_name("inference_pool_crd.yaml")
needs_schemas = pytest.mark.skipif(
    shutil.which("node") is None or not cached_models().exists(),
    reason="there are no schemas of custom resources here: python -m tools.helm --fetch",
)


def complaints(found: Sequence[Manifest]) -> list[str]:
    """Returns what the schemas of npm's @kubernetes-models have against each manifest; empty: nothing."""
    command = ["node", Path(__file__).with_name("custom_resources.mjs"), cached_models()]
    done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=True)
    verdicts: list[str] = json.loads(done.stdout)
    return verdicts


def validate_pool(manifest: Manifest) -> None:
    """Raises jsonschema.ValidationError. A field that an InferencePool does not have is an error, too."""
    jsonschema.validate(manifest, _schema_of_pools())


@cache
def _schema_of_pools() -> dict[str, Any]:
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return _strict(version["schema"]["openAPIV3Schema"])


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    found = copy.copy(schema)
    if "properties" in found:
        found["properties"] = {key: _strict(one) for key, one in found["properties"].items()}
        found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _strict(found["items"])
    return found
