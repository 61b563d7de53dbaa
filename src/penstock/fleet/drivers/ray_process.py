"""Ray as the fleet controller reaches it: by a child process (`ray_bridge`), which is started again when it has ended.

A look at the cluster that takes too long ends the child, and so do a head or a raylet that stay away. Calls then fail,
and the next one connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.converter import Converter
from penstock.core.errors import OrchestratorError
from penstock.core.private_files import make_private, open_private
from penstock.fleet.drivers.ray_cluster import ClusterView, EngineOrder, NodeReport, NodeView

_MAX_LINE = 1 << 26
_CONNECT_S = 60.0
_CALL_S = 20.0
_START_S = 60.0  # for an actor: an interpreter that imports Ray
_cluster_view_converter = Converter(ClusterView)
_nodes_converter = Converter(list[NodeView])
_node_reports_converter = Converter(list[NodeReport])


class _Bridge:
    """One child process, connected to Ray or about to be."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, namespace: str) -> None:
        self._process = process
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())
        self.is_over = False
        connect = {"address": address, "namespace": namespace}
        self._connecting = asyncio.create_task(self._ask("connect", connect, _CONNECT_S))

    async def call(self, method: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        await asyncio.shield(self._connecting)
        return await self._ask(method, arguments, timeout_s)

    async def _ask(self, method: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode({"id": number, "method": method, "arguments": arguments}) + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            reply = msgspec.json.decode(line)
            answer = self._waiting.get(reply["id"])
            if answer is None or answer.done():
                continue
            if reply["failure"]:
                answer.set_exception(OrchestratorError(f"Ray: {reply['failure']}"))
            else:
                answer.set_result(reply["result"])
        self.is_over = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(OrchestratorError("the connection to Ray has ended", reason="Unreachable"))
        await self._process.wait()

    def kill(self) -> None:
        self.is_over = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        self.kill()
        await asyncio.gather(self._reading, self._connecting, return_exceptions=True)


class RayProcess:
    """Belongs to the event loop."""

    def __init__(self, address: str, namespace: str, log_path: Path) -> None:
        """`log_path`: what Ray's library writes."""
        self._address = address
        self._namespace = namespace
        self._log_path = log_path
        self._bridge: _Bridge | None = None
        self._opening = asyncio.Lock()

    async def create_group(self, name: str, bundles: Sequence[Mapping[str, float]], wait_s: float) -> bool:
        arguments = {"name": name, "bundles": bundles, "wait_s": wait_s}
        return bool(await self._call("create_group", arguments, wait_s + _CALL_S))

    async def remove_group(self, name: str) -> None:
        await self._call("remove_group", {"name": name}, _CALL_S)

    async def start_engine(self, name: str, bundles: Sequence[Mapping[str, float]], order: EngineOrder) -> None:
        arguments = {"name": name, "bundles": bundles, "order": order}
        await self._call("start_engine", arguments, _START_S + (len(bundles) - 1) * _CALL_S)

    async def stop_engine(self, name: str, grace_s: float) -> None:
        await self._call("stop_engine", {"name": name, "grace_s": grace_s}, grace_s + 2 * _CALL_S)

    async def view(self, prefix: str) -> ClusterView:
        return _cluster_view_converter.convert(await self._call("view", {"prefix": prefix}, _CALL_S, is_vital=True))

    async def nodes(self) -> Sequence[NodeView]:
        return _nodes_converter.convert(await self._call("nodes", {}, _CALL_S))

    async def probe(
        self,
        nodes: Sequence[str],
        runtime_env: Mapping[str, Any],
        paths: Sequence[str],
        store: Sequence[tuple[str, int]],
        wait_s: float,
    ) -> Sequence[NodeReport]:
        arguments = {"nodes": nodes, "runtime_env": runtime_env, "paths": paths, "store": store, "wait_s": wait_s}
        return _node_reports_converter.convert(await self._call("probe", arguments, 2 * wait_s + _CALL_S))

    async def close(self) -> None:
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._bridge is not None:
            await self._bridge.close()

    async def _call(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float, *, is_vital: bool = False
    ) -> Any:
        """`is_vital`: without an answer in time the connection is given up."""
        async with self._opening:
            if self._bridge is None or self._bridge.is_over:
                await self._disconnect()
                self._bridge = _Bridge(await self._spawn(), self._address, self._namespace)
            bridge = self._bridge
        try:
            return await bridge.call(method, arguments, timeout_s)
        except TimeoutError:
            if is_vital:
                bridge.kill()
            raise OrchestratorError(f"Ray did not answer within {timeout_s:g} s", reason="Unreachable") from None

    async def _spawn(self) -> asyncio.subprocess.Process:
        make_private(self._log_path.parent)
        with open_private(self._log_path, "ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.fleet.drivers.ray_bridge"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is the controller's
                limit=_MAX_LINE,
            )
