"""A replica of a model that takes tensors: the real application behind the protocol's two ports, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock.core.settings import ServerSettings
from penstock.http.asgi import Application, AsgiApp
from penstock.tensors.replica import TensorReplica
from tests.oip.opened import Ports, opened
from tests.waiting import GIVE_UP_S


@dataclass
class Served:
    replica: TensorReplica
    ports: Ports

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        return call(self.ports, method, path, body, **headers)


def call(ports: Ports, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    """Status and body, as JSON where it is JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        content = response.read()
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, json.loads(content) if is_json else content


@contextlib.contextmanager
def serving(
    path: Path,
    settings: ServerSettings | None = None,
    paths: Callable[[], Mapping[str, Path]] | None = None,
    mount: Callable[[TensorReplica], Application] = lambda replica: replica,
) -> Iterator[Served]:
    """`path`: of a model; `paths`: of several, instead; `mount`: puts something in front of it, in its event loop."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[TensorReplica, Application]:
        replica = TensorReplica(path.stem, settings or ServerSettings(), 0, paths or (lambda: {path.stem: path}))
        await replica.repository.load_all()
        replica.open({"load": 0.1})
        return replica, mount(replica)

    try:
        replica, app = asyncio.run_coroutine_threadsafe(start(), loop).result(GIVE_UP_S)
        with opened(loop, AsgiApp(app), tensors=replica, repository=replica) as ports:
            yield Served(replica, ports)
            ports.run(replica.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(GIVE_UP_S)
        loop.close()
