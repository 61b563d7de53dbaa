"""Requests to a Kubernetes API server: objects as plain dictionaries, errors as one kind. It knows no kind of object.

The official client (`kubernetes.aio`, the extra `kubernetes`) finds the cluster, authenticates and speaks TLS; its
thousands of model classes are not used. A refusal of the server is an `OrchestratorError` whose `reason` is the
server's (AlreadyExists, Conflict, Expired, Forbidden, Invalid, NotFound, TooManyRequests), or `Unreachable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import ConfigError, OrchestratorError
from penstock.core.settings import setting

Object = dict[str, Any]  # of Kubernetes, as its JSON has it

UNREACHABLE = "Unreachable"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 20.0
_CONNECT_S = 10.0
_MAX_THROTTLED = 4  # answers "too many requests" in a row, after which the caller is told
_MAX_RETRY_AFTER_S = 10.0
_WATCH_S = 60  # the server ends a watch then, and a connection that has died unnoticed is found out
_LATE_S = 15.0
_REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid"}


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a Kubernetes cluster."""

    kubeconfig: str | None = setting(
        None, "kubeconfig file; auto: in a pod its service account, else KUBECONFIG or ~/.kube/config"
    )
    context: str | None = setting(None, "context of the kubeconfig; auto: its current one")
    namespace: str | None = setting(None, "namespace of the pods; auto: the pod's own, or the context's")


class KubernetesApi:
    """Belongs to one event loop. Constructing it does no I/O."""

    def __init__(self, cluster: ClusterSettings) -> None:
        self._cluster = cluster
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self.namespace = cluster.namespace or "default"  # from the first request on
        self.date: str | None = None  # of the last answer, by the server's clock

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None, kind: str = ""
    ) -> Object:
        """`kind`: the content type of a patch. A server that has too many requests is asked again when it says so."""
        for num_throttled in range(_MAX_THROTTLED + 1):
            try:
                async with self._opened(method, path, query or {}, body, kind, _TIMEOUT_S) as response:
                    with _unreachable():
                        document = msgspec.json.decode(await response.read())
                    return document if isinstance(document, dict) else {}
            except OrchestratorError as error:
                if error.retry_after_s is None or num_throttled == _MAX_THROTTLED:
                    raise
                await asyncio.sleep(min(error.retry_after_s, _MAX_RETRY_AFTER_S))
            except msgspec.DecodeError as error:
                raise OrchestratorError(f"Kubernetes answers {path} with something else: {error}") from None
        raise AssertionError("unreachable")

    async def merge(self, path: str, patch: Object) -> Object:
        return await self.request("PATCH", path, body=patch, kind="application/merge-patch+json")

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Events from `resourceVersion` on; the first is {} as soon as the server has agreed. It ends after a minute
        at most, and is resumed from the last version seen."""
        asked = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S), **query}
        async with self._opened("GET", path, asked, None, "", _WATCH_S + _LATE_S) as response:
            yield {}
            while True:
                with _unreachable():
                    line = await response.response.content.readline()
                if not line.endswith(b"\n"):  # the end, or what a broken connection left of a line
                    return
                event = msgspec.json.decode(line)
                if event.get("type") == "ERROR":
                    raise _refusal(event.get("object") or {}, int((event.get("object") or {}).get("code") or 500))
                yield event

    async def close(self) -> None:
        """A later request connects anew."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @contextlib.asynccontextmanager
    async def _opened(
        self, method: str, path: str, query: Mapping[str, str], body: Any, kind: str, timeout_s: float
    ) -> AsyncIterator[Any]:
        """The answer to a request that was not refused, with its body still to be read."""
        client = await self.connect()
        aiohttp = import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=_CONNECT_S)
        with _unreachable():
            asked = await client.param_serialize(
                method,
                path,
                query_params=[*query.items()],
                header_params={"Accept": "application/json", **({"Content-Type": kind} if kind else {})},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await client.call_api(*asked, _request_timeout=timeout)
        self.date = response.headers.get("Date")
        try:
            if response.status >= 400:
                with _unreachable():
                    said = await response.read()
                raise _refusal(_decoded(said), response.status, response.headers.get("Retry-After"))
            yield response
        finally:
            response.response.close()

    async def connect(self) -> Any:
        """Finds the cluster, and its namespace. Asks it nothing."""
        async with self._connecting:
            if self._client is None:
                check_client()
                client, config = import_module("kubernetes.aio.client"), import_module("kubernetes.aio.config")
                found = client.Configuration()
                try:
                    await self._configure(config, found)
                except (config.ConfigException, OSError) as error:
                    raise OrchestratorError(f"no Kubernetes cluster is known: {error}", reason=UNREACHABLE) from None
                self._client = client.ApiClient(found)
                self._client.user_agent = "penstock"
        return self._client

    async def _configure(self, config: Any, found: Any) -> None:
        named = self._cluster
        if named.kubeconfig is None and named.context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=found)
            with contextlib.suppress(OSError):
                self.namespace = named.namespace or (_ACCOUNT / "namespace").read_text().strip()
            return
        loader = await config.load_kube_config(
            named.kubeconfig, context=named.context, client_configuration=found, persist_config=False
        )
        context: Any = getattr(loader, "_current_context", None)
        if named.namespace is None and context is not None:
            with contextlib.suppress(config.ConfigException):  # it names none
                self.namespace = context["context"]["namespace"]


def check_client() -> None:
    """Raises ConfigError where the official client is not installed."""
    try:
        import_module("kubernetes.aio.client")
    except ImportError:
        raise ConfigError("Kubernetes needs its client: pip install 'penstock[kubernetes]'") from None


@contextlib.contextmanager
def _unreachable() -> Iterator[None]:
    refused, misled = import_module("aiohttp").ClientError, import_module("kubernetes.aio.config").ConfigException
    try:
        yield
    except (refused, misled, OSError, TimeoutError, ValueError) as error:
        said = str(error) or type(error).__name__
        raise OrchestratorError(f"Kubernetes cannot be reached: {said}", reason=UNREACHABLE) from None


def _decoded(body: bytes) -> Object:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        found = {"message": body[:200].decode(errors="replace").strip()}
    return found if isinstance(found, dict) else {}


def _refusal(status: Object, code: int, retry_after: str | None = None) -> OrchestratorError:
    reason = "Expired" if code == 410 else status.get("reason") or _REASONS.get(code, f"HTTP {code}")
    retry_after_s = None
    if code == 429 or (code == 503 and retry_after):
        with contextlib.suppress(ValueError):
            retry_after_s = max(0.0, float(retry_after or 1))
    return OrchestratorError(
        f"Kubernetes: {status.get('message') or reason}", reason=reason, retry_after_s=retry_after_s
    )
