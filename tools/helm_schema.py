"""values.schema.json of the Helm chart: strict, so that a mistyped key is refused before anything is installed.

Most of it follows from values.yaml, where every key has a default. What penstock itself reads (`config`, `settings`)
comes from penstock's own settings classes, so that the chart cannot know other settings than the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.core.settings import EngineSettings, ServerSettings
from penstock.core.slo import Slo
from penstock.fleet.settings import FleetSettings, PoolSettings
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings

Schema = dict[str, Any]

FREE: Schema = {"type": "object"}  # a piece of a manifest: Kubernetes checks it
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECTS: Schema = {"type": "array", "items": FREE}
TEXT: Schema = {"type": "string"}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
SECONDS: Schema = {"type": "integer", "minimum": 0}
DNS_LABEL: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$"}
DIGEST: Schema = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
SCALED_BY: Schema = {"enum": ["controller", "hpa", "keda", "none"]}

# By the last part of a key's path, or by the last two.
KNOWN: dict[str, Schema] = {
    "affinity": FREE,
    "annotations": TEXTS,
    "commonLabels": TEXTS,
    "cpuPercent": {"type": "integer", "minimum": 1, "maximum": 100},
    "dashboardLabels": TEXTS,
    "digest": DIGEST,
    "extraEnv": OBJECTS,
    "imagePullSecrets": OBJECTS,
    "labels": TEXTS,
    "maxReplicas": POSITIVE,
    "metricsFrom": OBJECTS,
    "adminFrom": OBJECTS,
    "envoyFrom": OBJECTS,
    "gatewayFrom": OBJECTS,
    "gpuTolerations": OBJECTS,
    "nodeSelector": TEXTS,
    "onLoss": {"enum": ["closed", "open"]},
    "podAnnotations": TEXTS,
    "podDisruptionBudget": FREE,
    "podLabels": TEXTS,
    "podSecurityContext": FREE,
    "processes": POSITIVE,
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "requestsPerReplica": POSITIVE,
    "resources": FREE,
    "securityContext": FREE,
    "tolerations": OBJECTS,
    "cache.kind": {"enum": ["emptyDir", "hostPath", "persistentVolumeClaim"]},
    "endpointPicker.config": {"$ref": "#/$defs/GatewaySettings"},
    "endpointPicker.replicas": POSITIVE,
    "fleet.config": {"$ref": "#/$defs/FleetSettings"},
    "fleet.replicas": POSITIVE,
    "gateway.config": {"$ref": "#/$defs/GatewaySettings"},
    "gateway.replicas": POSITIVE,
    "test.key": {"type": "string", "minLength": 1},
    "test.timeoutSeconds": POSITIVE,
    "limiter.kind": {"enum": ["redis", "perGateway"]},
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "store.kind": {"enum": ["postgresql", "sqlite"]},
}


def values_schema(values: Path) -> Schema:
    found = yaml.safe_load(values.read_text())
    found.pop("pools")
    schema = _strict({key: _of(value, key) for key, value in found.items()})
    pool = schema["properties"]["replicas"]["properties"] | {
        "name": DNS_LABEL,
        "version": DNS_LABEL,
        "scaledBy": SCALED_BY,
        "settings": {"$ref": "#/$defs/PoolSettings"},
        "resources": FREE,
    }
    schema["properties"]["pools"] = {"type": "array", "items": _strict(pool) | {"required": ["name"]}}
    schema["properties"]["global"] = FREE  # Helm's own, of a chart above this one
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the penstock chart",
        **schema,
        "$defs": _penstock_settings(),
    }


def _of(value: Any, path: str) -> Schema:
    last, parent = path.split(".")[-1], ".".join(path.split(".")[-2:])
    if known := KNOWN.get(parent) or KNOWN.get(last):
        return known
    if isinstance(value, dict):
        if not value:
            raise ValueError(f"{path} of values.yaml is empty, and KNOWN does not say what it may be")
        return _strict({key: _of(below, f"{path}.{key}") for key, below in value.items()})
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return SECONDS if last.endswith("Seconds") else {"type": "integer", "minimum": 0}
    if isinstance(value, str):
        return TEXT
    raise ValueError(f"{path} of values.yaml is a {type(value).__name__}, and KNOWN does not say what it may be")


def _strict(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _penstock_settings() -> dict[str, Schema]:
    """Schemas of penstock's settings, by class."""
    classes = [GatewaySettings, ModelSettings, FleetSettings, PoolSettings, EngineSettings, ServerSettings, Slo]
    _, found = msgspec.json.schema_components(classes, ref_template="#/$defs/{name}")
    for one in found.values():
        if "properties" in one:
            one["additionalProperties"] = False
    of_models = {"anyOf": [{"$ref": "#/$defs/ModelSettings"}, {"type": "null"}]}
    found["GatewaySettings"]["properties"]["models"]["additionalProperties"] = of_models
    found["PoolSettings"]["properties"]["server"] = {"$ref": "#/$defs/ServerSettings"}
    for one in ("PoolSettings", "ModelSettings"):
        found[one]["properties"]["slo"] = {"$ref": "#/$defs/Slo"}
    for name in ("name", "store", "pools", "gateway", "driver"):  # the chart's own
        found["FleetSettings"]["properties"].pop(name)
    found["GatewaySettings"]["properties"].pop("store")
    return found
