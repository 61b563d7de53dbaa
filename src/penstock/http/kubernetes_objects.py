"""Parts of Kubernetes objects that several readers want: a pod's address, readiness and end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.http.kubernetes_api import Object

_SCHEMES = ("http", "https")


def pod_url(pod: Object, port: str | int | None = None, scheme: str | None = None) -> str:
    """Address of what a pod serves; empty: it has none yet. `port`: a number or a port's name; None: the one that is
    called http or https, or the only one. `scheme`: if the port's name is none."""
    address = status_of(pod).get("podIP") or ""
    ports = [one for container in spec_of(pod).get("containers") or () for one in container.get("ports") or ()]
    found: Object
    if isinstance(port, int):
        found = {"containerPort": port}
    elif port is not None:
        found = next((one for one in ports if one.get("name") == port), {})
    else:
        named = [one for one in ports if one.get("name") in _SCHEMES]
        found = named[0] if named else ports[0] if len(ports) == 1 else {}
    if not address or not found:
        return ""
    name = found.get("name")
    shown = f"[{address}]" if ":" in address else address
    return f"{scheme or (name if name in _SCHEMES else 'http')}://{shown}:{found['containerPort']}"


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def has_ended(pod: Object) -> bool:
    return status_of(pod).get("phase") in ("Failed", "Succeeded")


def is_leaving(pod: Object) -> bool:
    """Whether somebody has asked for its end."""
    return pod["metadata"].get("deletionTimestamp") is not None


def condition(one: Object, kind: str) -> Mapping[str, Any]:
    found: Mapping[str, Any]
    for found in status_of(one).get("conditions") or ():
        if found.get("type") == kind:
            return found
    return {}


def spec_of(one: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = one.get("spec") or {}
    return found


def status_of(one: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = one.get("status") or {}
    return found
