"""Values that a pod takes from elsewhere: its environment and its volumes, as a kubelet fills them in.

Containers share the machine's network, so the address of all interfaces in what a pod is given becomes the pod's own.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.kubernetes.api import Api, ApiError, Object

_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)")
_FIELD_KEY = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_ANY_ADDRESS = "0.0.0.0"


class PodValues:
    def __init__(self, api: Api, pod: Object, address: str, host_address: str) -> None:
        self._api = api
        self._pod = pod
        self._address = address
        self._host_address = host_address
        self._path = f"/api/v1/namespaces/{pod['metadata']['namespace']}"

    async def environment(self, spec: Object) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in spec.get("envFrom", ()):
            kind, reference = (
                ("secrets", one["secretRef"]) if "secretRef" in one else ("configmaps", one["configMapRef"])
            )
            prefix = one.get("prefix", "")
            found |= {prefix + key: value.decode() for key, value in (await self._read(kind, reference)).items()}
        for one in spec.get("env", ()):
            value = await self._value(one["valueFrom"], spec) if "valueFrom" in one else one.get("value", "")
            if value is not None:
                found[one["name"]] = self.local(expand(value, found))
        return found

    async def volumes(self, directory: Path, disk: Path) -> dict[str, Path]:
        """Directories by volume. `disk`: what the node keeps."""
        found = {}
        for volume in self._pod["spec"].get("volumes", ()):
            path = directory / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            found[volume["name"]] = await self._fill(path, volume, disk)
        return found

    def local(self, text: str) -> str:
        return text.replace(_ANY_ADDRESS, self._address)

    async def _fill(self, path: Path, volume: Object, disk: Path) -> Path:
        if "hostPath" in volume:
            path = _on_disk(Path(volume["hostPath"]["path"]), disk)
        elif "persistentVolumeClaim" in volume:
            path = disk / "claims" / volume["persistentVolumeClaim"]["claimName"]
        path.mkdir(parents=True, exist_ok=True)
        for source in volume.get("projected", {}).get("sources", [volume]):
            for name, content in (await self._files(source)).items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(content)
        return path

    async def _files(self, source: Object) -> dict[str, bytes]:
        if "configMap" in source:
            found = _chosen(await self._read("configmaps", source["configMap"]), source["configMap"])
            return {name: self.local(value.decode()).encode() for name, value in found.items()}
        if "secret" in source:
            reference = source["secret"]
            named = {"name": reference.get("secretName", reference.get("name")), **reference}
            return _chosen(await self._read("secrets", named), reference)
        if "downwardAPI" in source:
            return {one["path"]: self.field(one["fieldRef"]).encode() for one in source["downwardAPI"]["items"]}
        if "serviceAccountToken" in source:
            account = self._pod["spec"].get("serviceAccountName", "default")
            asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            answer = await self._api.create(f"{self._path}/serviceaccounts/{account}/token", asked)
            return {source["serviceAccountToken"]["path"]: str(answer["status"]["token"]).encode()}
        return {}

    async def _value(self, source: Object, spec: Object) -> str | None:
        if "fieldRef" in source:
            return self.field(source["fieldRef"])
        if "resourceFieldRef" in source:
            kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
            return str(spec.get("resources", {}).get(kind, {}).get(name, ""))
        kind, reference = next(iter(source.items()))
        values = await self._read({"secretKeyRef": "secrets", "configMapKeyRef": "configmaps"}[kind], reference)
        if reference["key"] not in values and reference.get("optional"):
            return None
        return values[reference["key"]].decode()

    def field(self, reference: Object) -> str:
        path = reference["fieldPath"]
        if found := _FIELD_KEY.fullmatch(path):
            return str(self._pod["metadata"].get(found[1], {}).get(found[2], ""))
        known = {
            "status.podIP": self._address,
            "status.podIPs": self._address,
            "status.hostIP": self._host_address,
            **{f"metadata.{key}": self._pod["metadata"].get(key, "") for key in ("name", "namespace", "uid")},
            **{f"spec.{key}": self._pod["spec"].get(key, "") for key in ("nodeName", "serviceAccountName")},
        }
        return str(known[path])

    async def _read(self, kind: str, reference: Mapping[str, Any]) -> dict[str, bytes]:
        try:
            found = await self._api.get(f"{self._path}/{kind}/{reference['name']}")
        except ApiError as error:
            if error.status == 404 and reference.get("optional"):
                return {}
            raise
        if kind == "secrets":
            return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
        return {key: value.encode() for key, value in (found.get("data") or {}).items()}


def mounts_of(spec: Object, volumes: Mapping[str, Path]) -> dict[str, Path]:
    """Sources by path in the container."""
    found = {}
    for one in spec.get("volumeMounts", ()):
        source = volumes[one["name"]]
        if one.get("subPath"):
            source = source / one["subPath"]
            if not source.exists():
                source.mkdir(parents=True)
        found[one["mountPath"]] = source
    return found


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` becomes the variable's value, as Kubernetes writes it; an unknown one stays."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def _on_disk(path: Path, disk: Path) -> Path:
    """A path of the node: the machine's own where it is there, else one that is made for this node."""
    return path if path.exists() else disk / "host" / path.relative_to("/")


def _chosen(values: dict[str, bytes], reference: Mapping[str, Any]) -> dict[str, bytes]:
    items = reference.get("items")
    return values if not items else {one["path"]: values[one["key"]] for one in items if one["key"] in values}
