"""A namespace of the test cluster: objects are made, looked at and waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tools.kubernetes.api import Api, ApiError, Object

T = TypeVar("T")

PATIENCE_S = 240.0  # for a start on a busy machine
_LOOK_S = 0.1
_GROUPS = {"Deployment": "apps/v1", "Eviction": "policy/v1beta1"}


async def until(
    look: Callable[[], Awaitable[T]], is_so: Callable[[T], object] = bool, *, within_s: float = PATIENCE_S
) -> T:
    """`eventually` where the look is a call that is awaited."""
    began_s = time.monotonic()
    while not is_so(value := await look()):
        if time.monotonic() - began_s > within_s:
            raise AssertionError(f"it never happened within {within_s:.0f} s; the last look saw {str(value)[-3000:]}")
        await asyncio.sleep(_LOOK_S)
    return value


class Namespace:
    def __init__(self, api: Api, name: str) -> None:
        self.api = api
        self.name = name

    def path(self, kind: str, name: str = "") -> str:
        group = _GROUPS.get(kind)
        prefix = f"/apis/{group}" if group else "/api/v1"
        return f"{prefix}/namespaces/{self.name}/{kind.lower()}s" + (f"/{name}" if name else "")

    async def create(self, kind: str, name: str, **fields: Any) -> Object:
        body = {"metadata": {"name": name, **fields.pop("metadata", {})}, **fields}
        return await self.api.create(self.path(kind), body)

    async def get(self, kind: str, name: str) -> Object | None:
        try:
            return await self.api.get(self.path(kind, name))
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def pods(self, **labels: str) -> dict[str, Object]:
        """Pods with these labels, by name."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        found = await self.api.get(self.path("Pod"), labelSelector=selector)
        return {one["metadata"]["name"]: one for one in found["items"]}

    async def ready(self, **labels: str) -> dict[str, Object]:
        """Those of them that are ready and stay."""
        return {name: one for name, one in (await self.pods(**labels)).items() if is_ready(one)}

    async def wait_until_ready(self, name: str) -> Object:
        found = await until(lambda: self.get("Pod", name), lambda pod: pod is not None and is_ready(pod))
        assert found is not None
        return found

    async def wait_until_gone(self, kind: str, name: str) -> None:
        await until(lambda: self.get(kind, name), lambda found: found is None)


def is_ready(pod: Object) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def address(pod: Object) -> str:
    return str(pod["status"]["podIP"])
