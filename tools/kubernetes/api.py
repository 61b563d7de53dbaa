"""A small client of the Kubernetes API for tests and the node agent: paths and plain JSON objects, nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_TIMEOUT_S = 30.0
_WATCH_S = 300


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:500]}")
        self.status = status


class Api:
    """Belongs to the event loop in which it is entered. A lost API server is an OSError or a TimeoutError."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            self._url,
            headers={"authorization": f"Bearer {self._token}"},
            connector=aiohttp.TCPConnector(ssl=False, limit=0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str, **query: str) -> Object:
        return await self._call("GET", path, query=query)

    async def create(self, path: str, body: Object) -> Object:
        return await self._call("POST", path, body)

    async def patch(self, path: str, body: Object, kind: str = MERGE) -> Object:
        return await self._call("PATCH", path, body, content_type=kind)

    async def delete(self, path: str, **options: Any) -> Object:
        return await self._call("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[Object]:
        """Events after this version, until the server ends the watch; one that is too old is an ApiError with 410."""
        asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S), **query}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S)
        async with self._session.get(path, params=asked, timeout=timeout) as answer:
            await _check(answer)
            async for line in _lines(answer.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(int(event["object"].get("code", 500)), line.decode())
                yield event

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        data = None if body is None else json.dumps(body)
        headers = {"content-type": content_type}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with self._session.request(
            method, path, data=data, headers=headers, params=query or {}, timeout=timeout
        ) as answer:
            await _check(answer)
            found: Object = await answer.json()
            return found


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status >= 300:
        raise ApiError(answer.status, await answer.text())


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: an object may be longer than a reader's limit."""
    rest = b""
    async for part in stream.iter_any():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line


UNAVAILABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)  # of a call: the API server is not there
