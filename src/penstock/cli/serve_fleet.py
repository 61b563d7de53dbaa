"""`penstock serve MODEL --replicas 1..4`: a gateway, and as many replicas behind it as the demand needs.

It is a fleet of one pool whose controller and gateway are this process. The replicas end when it does, however it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import uvloop

from penstock.api.relay import SECRET_VARIABLE
from penstock.cli.before_serving import check, check_torch
from penstock.cli.fleet_process import fleet_directory
from penstock.cli.gateway_process import Opened
from penstock.cli.pipeline import load_pipelines
from penstock.cli.replicas import gateway_in_front, run_gateway, shared_secret, template_modules, with_transfer
from penstock.cli.store_flags import store_url
from penstock.core.errors import ConfigError, EngineFailed
from penstock.core.private_files import make_private, open_private
from penstock.core.settings import ServerSettings, Settings
from penstock.core.slo import Slo
from penstock.engine_process.spawn import ChildProcess, TemplateProcess, spawn
from penstock.fleet.controller import Controller
from penstock.fleet.drivers.local import LocalDriver
from penstock.fleet.replica_client import ReplicaClient
from penstock.fleet.residency.shared_device import SharedDevice
from penstock.fleet.settings import FleetSettings
from penstock.gateway.settings.gateway import GatewaySettings
from penstock.hub.resolve import default_name
from penstock.server.ready import client_url, loading_message
from penstock.tenancy.fleet import FleetReplica, PoolStatus
from penstock.tenancy.store import open_store
from penstock.tensors.repository import is_tensor_model

_STOP_S = 10.0
_OF_THE_GATEWAY = {"host", "port", "grpc_port", "name", "tls_cert", "tls_key", "client_ca", "gateway_secret"}


def serve_range(
    settings: Settings, fewest: int, most: int, num_processes: int = 1, pipelines: Sequence[str] = ()
) -> None:
    """Serves until a signal ends it. `num_processes`: of the gateway; `pipelines`: their files."""
    load_pipelines(pipelines)  # what is wrong with one is told at once
    check_torch()
    if settings.server.client_ca is not None:
        raise ConfigError("client_ca is for one replica; a gateway knows its clients by their keys", param="client_ca")
    files = check(settings)
    print(loading_message(settings.server.name or default_name(settings.model), settings, files.path), flush=True)
    with (
        shared_secret(settings.server.gateway_secret),
        name_of_its_own() as name,
        tempfile.TemporaryDirectory(prefix="penstock-") as directory,
        TemplateProcess.start(template_modules(), Path(directory)),
    ):
        fleet = _fleet(with_transfer(settings, files), name, fewest, most)
        uvloop.run(_serve(settings, fleet, Path(directory), num_processes, pipelines))


class Lines(Protocol):
    """Lines for the terminal about a fleet that ends with this process."""

    cannot_start: asyncio.Future[None]  # raises why nothing can be served

    def show(self, statuses: Sequence[PoolStatus]) -> None: ...

    def show_failure(self, row: FleetReplica, failure: str) -> None: ...


async def _serve(
    settings: Settings, fleet: FleetSettings, directory: Path, num_processes: int, pipelines: Sequence[str]
) -> None:
    (pool,) = fleet.pools
    await run_fleet(settings, fleet, directory, num_processes, partial(_Lines, pool), pipelines=pipelines)


async def run_fleet(
    settings: Settings,
    fleet: FleetSettings,
    directory: Path,
    num_processes: int,
    make_lines: Callable[[GatewaySettings, asyncio.Future[Opened]], Lines],
    device: SharedDevice | None = None,
    pipelines: Sequence[str] = (),
    admin_port: int | None = None,
) -> None:
    """A gateway, and a controller whose replicas end with this process. `settings`: those of the gateway's port;
    `device`: the one that all pools share, if they do; `pipelines`: their files; `admin_port`: one for the console and
    the admin API alone."""
    url = store_url(None, None)
    models = {pool: {"secret_env": SECRET_VARIABLE} for pool in fleet.pools}
    gateway = gateway_in_front(settings, url, models, pipelines)
    largest = max(ServerSettings(**pool.get("server", {})).max_body_bytes for pool in fleet.pools.values())
    gateway = replace(gateway, admin_port=admin_port, max_body_bytes=max(gateway.max_body_bytes, largest))
    opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
    secret = os.environ[SECRET_VARIABLE]
    client = ReplicaClient(secret)
    driver = LocalDriver(fleet_directory(fleet.name) / "replicas", secret, spawn=_spawn_child)
    with open_store(url) as store:
        lines = make_lines(gateway, opened)
        controller = Controller(
            fleet,
            store,
            driver,
            client,
            device=device,
            is_alone=True,
            is_ephemeral=True,
            on_change=lines.show,
            on_failure=lines.show_failure,
        )
        ending: list[asyncio.Future[Any]] = [
            asyncio.create_task(run_gateway(gateway, url, directory, num_processes, opened.set_result)),
            asyncio.create_task(controller.run()),
            lines.cannot_start,
        ]
        try:
            done, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in ending:
                one.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await controller.stop_all(_STOP_S)
            client.close()
            await driver.close()
    for one in done:
        one.result()


def of_replicas(server: ServerSettings) -> dict[str, Any]:
    """Settings of the one server that each of its replicas has, and not the gateway in front of them."""
    plain = ServerSettings()
    chosen = {one.name: getattr(server, one.name) for one in fields(ServerSettings)}
    return {key: value for key, value in chosen.items() if value != getattr(plain, key) and key not in _OF_THE_GATEWAY}


def _fleet(settings: Settings, name: str, fewest: int, most: int) -> FleetSettings:
    pool: dict[str, Any] = {
        "model": settings.model,
        "tensors": is_tensor_model(settings.model),
        "engine": asdict(settings.engine),
        "server": of_replicas(settings.server),
        "min": fewest,
        "max": most,
    }
    served_as = settings.server.name or default_name(settings.model)
    return FleetSettings(name=name, slo=settings.slo or Slo(), pools={served_as: pool})


async def _spawn_child(module: str, arguments: Sequence[str], *, outlives: bool, **more: Any) -> ChildProcess:
    """A replica that ends with this process."""
    return await spawn(module, arguments, **more)


class _Lines:
    """Lines in the terminal: how to use it when the first replica is active, and each change of the pool."""

    def __init__(self, pool: str, gateway: GatewaySettings, opened: asyncio.Future[Opened]) -> None:
        self._pool = pool
        self._gateway = gateway
        self._opened = opened
        self._began_s = asyncio.get_running_loop().time()
        self._last = ""
        self.cannot_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises why

    def show_failure(self, row: FleetReplica, failure: str) -> None:
        """A first replica that cannot be started ends everything: to try again would not help."""
        if not self._last and row.ready_at is None and not self.cannot_start.done():
            self.cannot_start.set_exception(EngineFailed(failure))

    def show(self, statuses: Sequence[PoolStatus]) -> None:
        (status,) = statuses
        num_active = status.states.get("active", 0)
        if not self._last and num_active and self._opened.done():
            print(self._ready(self._opened.result(), status), flush=True)
        if not num_active and not self._last:
            return
        states = ", ".join(f"{count} {state}" for state, count in sorted(status.states.items()))
        line = f"{states or 'no replicas'}; {status.wanted} wanted"
        if line != self._last:
            print(f"{line}: {status.reason}" if status.reason else line, flush=True)
            self._last = line

    def _ready(self, opened: Opened, status: PoolStatus) -> str:
        url = client_url(opened.listener, is_tls=self._gateway.tls_cert is not None)
        seconds = asyncio.get_running_loop().time() - self._began_s
        key = " -H 'authorization: Bearer KEY'" if opened.has_tenants else ""
        message = '{"role":"user","content":"Why is the sky blue?"}'
        body = f'{{"model":"{self._pool}","stream":true,"temperature":0,"messages":[{message}]}}'
        return f"""
penstock serves {self._pool} at {url}   (ready in {seconds:.1f} s)

  replicas        {status.min} to {status.max} behind a gateway, as many as the demand needs; penstock fleet explain

Try it:

  curl -N {url}/v1/chat/completions{key} -d '{body}'
"""


@contextmanager
def name_of_its_own() -> Iterator[str]:
    """The name of a fleet that no other process of this machine has as long as this lasts: serve, serve-2 and on."""
    for number in count(1):
        name = "serve" if number == 1 else f"serve-{number}"
        make_private(fleet_directory(name))
        with open_private(fleet_directory(name) / "lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield name
            return
