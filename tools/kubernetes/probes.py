"""Probes and lifecycle hooks of a container: one attempt, and the loop that counts successes and failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from tools.kubernetes.api import UNAVAILABLE
from tools.kubernetes.container import Container


class ContainerCalls:
    """Calls that a kubelet makes to a container at its pod's address."""

    def __init__(self, spec: dict[str, Any], container: Container, address: str, http: aiohttp.ClientSession) -> None:
        self._ports = {one["name"]: one["containerPort"] for one in spec.get("ports", ()) if "name" in one}
        self._container = container
        self._address = address
        self._http = http

    async def call(self, action: dict[str, Any], timeout_s: float) -> bool:
        """Whether the action of a probe or a hook succeeds."""
        if "exec" in action:
            return await self._container.execute(action["exec"]["command"], timeout_s)
        if "sleep" in action:
            await asyncio.sleep(action["sleep"]["seconds"])
            return True
        if "tcpSocket" in action:
            return await self._connects(self._port(action["tcpSocket"]["port"]), timeout_s)
        return await self._answers(action["httpGet"], timeout_s)

    def _port(self, named: int | str) -> int:
        return int(self._ports.get(named, named))

    async def _connects(self, port: int, timeout_s: float) -> bool:
        with contextlib.suppress(*UNAVAILABLE):
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(self._address, port)
                writer.close()
                return True
        return False

    async def _answers(self, get: dict[str, Any], timeout_s: float) -> bool:
        scheme = get.get("scheme", "HTTP").lower()
        url = f"{scheme}://{get.get('host', self._address)}:{self._port(get['port'])}{get.get('path', '/')}"
        headers = {one["name"]: one["value"] for one in get.get("httpHeaders", ())}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with contextlib.suppress(*UNAVAILABLE):
            async with self._http.get(url, headers=headers, timeout=timeout, ssl=False) as answer:
                return 200 <= answer.status < 400
        return False


async def watch_probe(
    probe: dict[str, Any], attempt: Callable[[dict[str, Any], float], Awaitable[bool]], tell: Callable[[bool], None]
) -> None:
    """Tells each verdict, until it is cancelled: True after so many successes, False after so many failures."""
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    thresholds = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
    last, times = None, 0
    while True:
        found = await attempt(probe, probe.get("timeoutSeconds", 1))
        last, times = found, times + 1 if found == last else 1
        if times == thresholds[found]:
            tell(found)
        await asyncio.sleep(probe.get("periodSeconds", 10))
