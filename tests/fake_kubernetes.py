"""A fake Kubernetes API server: real HTTP, objects in memory, versions, watches, and faults that a test injects.

It keeps what clients can see of the real one: resourceVersions that only grow, 409 for what is there or has changed
since, 422 for what is malformed, 410 for a version that is too old to watch from, bookmarks, deletion with grace (a pod
that no node has goes at once), bindings and the status subresource. It schedules nothing and runs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

from aiohttp import web

Object = dict[str, Any]
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
_KINDS = {"pods": "Pod", "nodes": "Node", "leases": "Lease", "secrets": "Secret", "leaderworkersets": "LeaderWorkerSet"}
_NOW = "2026-11-17T00:00:00Z"


class Refusal(Exception):
    def __init__(self, code: int, reason: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.headers = code, reason, headers

    def status(self) -> Object:
        return {"kind": "Status", "status": "Failure", "code": self.code, "reason": self.reason, "message": str(self)}


class FakeKubernetes:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._version = 100
        self._objects: dict[tuple[str, str], Object] = {}  # by path of the collection, and name
        self._events: list[tuple[int, str, str, Object]] = []  # version, collection, type, object
        self._oldest = 0  # a watch from before this version has expired
        self._changed = asyncio.Condition()
        self._watches: set[asyncio.Task[Any]] = set()
        self.url = ""
        self.requests: list[str] = []  # "METHOD path"
        self.is_down = False
        self.num_throttled = 0  # so many requests from now on are answered with 429
        self.quota: str = ""  # why no pod may be created; empty: one may
        self.forbidden: set[str] = set()  # collections that may not be read: "nodes"
        self.hangs = False  # no request is answered
        self.documents: dict[str, Object] = {}  # answers to GET by path, such as /version
        self.denied: set[str] = set()  # rights that a review does not find: "create pods"

    # -- faults

    def go_down(self) -> None:
        """Every connection is cut, and so is every one that is tried."""
        self.is_down = True
        self.drop_watches()

    def come_up(self) -> None:
        self.is_down = False

    def drop_watches(self) -> None:
        for watch in self._watches:
            watch.cancel()

    def forget_history(self) -> None:
        """No watch can go on from a version that was seen before."""
        self._oldest = self._version = self._version + 1

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    # -- HTTP

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self.hangs:
            await asyncio.Event().wait()
        if self.is_down:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=500)
        try:
            if self.num_throttled:
                self.num_throttled -= 1
                raise Refusal(429, "TooManyRequests", "too many requests", **{"Retry-After": "0"})
            return await self._dispatch(request)
        except Refusal as refusal:
            return web.json_response(refusal.status(), status=refusal.code, headers=refusal.headers)

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        collection, name, part = _split(request.path)
        if collection.rpartition("/")[2] in self.forbidden:
            raise Refusal(403, "Forbidden", f"{collection} is forbidden")
        body = json.loads(await request.read() or b"{}")
        if request.method == "GET" and request.path in self.documents:
            return web.json_response(self.documents[request.path])
        if collection.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            allowed = f"{asked['verb']} {asked['resource']}" not in self.denied
            return web.json_response(body | {"status": {"allowed": allowed}}, status=201)
        match request.method:
            case "GET" if not name and request.query.get("watch") == "true":
                return await self._watch(request, collection)
            case "GET" if not name:
                return web.json_response(self._list(collection, request.query.get("labelSelector", "")))
            case "GET":
                return web.json_response(self._get(collection, name))
            case "POST" if part == "binding":
                return web.json_response(await self._bind(collection, name, body), status=201)
            case "POST":
                return web.json_response(await self._create(collection, body), status=201)
            case "PUT":
                return web.json_response(await self._replace(collection, name, body))
            case "PATCH":
                patched = _merged(self._get(collection, name), body)
                return web.json_response(await self._store(collection, "MODIFIED", patched))
            case "DELETE":
                return web.json_response(await self._delete(collection, name, body.get("gracePeriodSeconds")))
        raise Refusal(405, "MethodNotAllowed", request.method)

    def _list(self, collection: str, selector: str) -> Object:
        found = [one for (place, _), one in self._objects.items() if place == collection and _matches(one, selector)]
        return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": found}

    def _get(self, collection: str, name: str) -> Object:
        if (collection, name) not in self._objects:
            raise Refusal(404, "NotFound", f'{collection.rpartition("/")[2]} "{name}" not found')
        return self._objects[collection, name]

    async def _create(self, collection: str, body: Object) -> Object:
        name = (body.get("metadata") or {}).get("name") or ""
        is_pod = collection.endswith("/pods")
        if not _NAME.match(name) or len(name) > 253 or (is_pod and not (body.get("spec") or {}).get("containers")):
            raise Refusal(422, "Invalid", f'"{name}" is invalid')
        if (collection, name) in self._objects:
            raise Refusal(409, "AlreadyExists", f'"{name}" already exists')
        if is_pod and self.quota:
            raise Refusal(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: {self.quota}')
        kind = _KINDS[collection.rpartition("/")[2]]
        metadata = body["metadata"] | {"uid": str(uuid.uuid4()), "creationTimestamp": _NOW}
        status = body.get("status") or ({"phase": "Pending"} if is_pod else {})
        return await self._store(collection, "ADDED", body | {"kind": kind, "metadata": metadata, "status": status})

    async def _replace(self, collection: str, name: str, body: Object) -> Object:
        known = self._get(collection, name)
        version = body["metadata"].get("resourceVersion")
        if version is not None and version != known["metadata"]["resourceVersion"]:
            raise Refusal(409, "Conflict", f'"{name}" has been modified')
        metadata = known["metadata"] | body["metadata"]
        return await self._store(collection, "MODIFIED", body | {"metadata": metadata})

    async def _bind(self, collection: str, name: str, body: Object) -> Object:
        pod = self._get(collection, name)
        if pod["spec"].get("nodeName"):
            raise Refusal(409, "Conflict", f'pod "{name}" is already assigned to node')
        await self._store(collection, "MODIFIED", _merged(pod, {"spec": {"nodeName": body["target"]["name"]}}))
        return {"kind": "Status", "status": "Success"}

    async def _delete(self, collection: str, name: str, grace_s: int | None) -> Object:
        known = self._get(collection, name)
        spec, status, metadata = known.get("spec") or {}, known.get("status") or {}, known["metadata"]
        grace_s = spec.get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
        is_running = bool(spec.get("nodeName")) and status.get("phase") not in ("Succeeded", "Failed")
        if collection.endswith("/pods") and is_running and grace_s > 0:
            if grace_s >= metadata.get("deletionGracePeriodSeconds", grace_s + 1):
                return known
            leaving = {"deletionTimestamp": _NOW, "deletionGracePeriodSeconds": grace_s}
            return await self._store(collection, "MODIFIED", _merged(known, {"metadata": leaving}))
        del self._objects[collection, name]
        return await self._tell(collection, "DELETED", known)

    async def _store(self, collection: str, kind: str, one: Object) -> Object:
        told = await self._tell(collection, kind, one)
        self._objects[collection, one["metadata"]["name"]] = told
        return told

    async def _tell(self, collection: str, kind: str, one: Object) -> Object:
        self._version += 1
        one = _merged(one, {"metadata": {"resourceVersion": str(self._version)}})
        self._events.append((self._version, collection, kind, one))
        async with self._changed:
            self._changed.notify_all()
        return one

    async def _watch(self, request: web.Request, collection: str) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await self._tell_all(response, collection, request.query.get("labelSelector", ""), version)
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass
        finally:
            self._watches.discard(task)
        return response

    async def _tell_all(self, response: web.StreamResponse, collection: str, selector: str, version: int) -> None:
        async def write(kind: str, one: Object) -> None:
            await response.write(json.dumps({"type": kind, "object": one}).encode() + b"\n")

        if version < self._oldest:
            await write("ERROR", Refusal(410, "Expired", "too old resource version").status())
            return
        while True:
            for at, place, kind, one in [*self._events]:
                if at > version and place == collection and _matches(one, selector):
                    await write(kind, one)
            version = self._version
            await write("BOOKMARK", {"kind": "Bookmark", "metadata": {"resourceVersion": str(version)}})
            async with self._changed:
                await self._changed.wait_for(lambda seen=version: self._version > seen)  # type: ignore[misc]


def _split(path: str) -> tuple[str, str, str]:
    """Collection, name and subresource of /api/v1/namespaces/NS/pods/NAME/status."""
    parts = path.strip("/").split("/")
    end = 2 if parts[0] == "api" else 3
    if len(parts) > end and parts[end] == "namespaces":
        end += 2
    rest = [*parts[end + 1 :], "", ""]
    return "/" + "/".join(parts[: end + 1]), rest[0], rest[1]


def _matches(one: Object, selector: str) -> bool:
    labels = one["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, sign, value = term.partition("=")
        if key.endswith("!"):
            if labels.get(key[:-1]) == value:
                return False
        elif (labels.get(key) != value.removeprefix("=")) if sign else (key not in labels):
            return False
    return True


def _merged(one: Any, patch: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(one, dict) or not isinstance(patch, dict):
        return patch
    found = {key: value for key, value in one.items() if key not in patch}
    return found | {key: _merged(one.get(key), value) for key, value in patch.items() if value is not None}


def write_kubeconfig(path: Path, server: str, namespace: str = "") -> Path:
    context = {"cluster": "fake", "user": "fake"} | ({"namespace": namespace} if namespace else {})
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": server}}],
        "users": [{"name": "fake", "user": {"token": "fake"}}],
        "contexts": [{"name": "fake", "context": context}],
        "current-context": "fake",
    }
    path.write_text(json.dumps(document))
    return path


@contextlib.asynccontextmanager
async def fake_kubernetes() -> AsyncIterator[FakeKubernetes]:
    server = FakeKubernetes()
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]] = server.answer
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        with mock.patch.dict(os.environ, SSL_CERT_FILE=os.devnull):  # a client reads the system's CAs: 20 ms each time
            yield server
    finally:
        server.drop_watches()
        await runner.cleanup()
