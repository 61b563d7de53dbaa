"""The process of `penstock fleet`: a controller over a store and a driver, and a gateway that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from penstock.api.relay import SECRET_VARIABLE
from penstock.cli.config_file import read_config_file
from penstock.cli.fleet_drivers import check_driver, open_driver, open_lease
from penstock.cli.replicas import template_modules
from penstock.cli.store_flags import store_url
from penstock.core.config import build, within
from penstock.core.errors import ConfigError
from penstock.core.private_files import make_private
from penstock.engine_process.spawn import TemplateProcess
from penstock.fleet.controller import Controller
from penstock.fleet.drivers.local import LocalDriver
from penstock.fleet.drivers.spot_notice import seconds_left
from penstock.fleet.gateway_keeper import GatewayKeeper
from penstock.fleet.replica_client import ReplicaClient
from penstock.fleet.settings import FleetSettings, replica_settings
from penstock.gateway.replicas.fetch import fetch
from penstock.gateway.settings.gateway import GatewaySettings, pools_of, routes_of
from penstock.http.call import Failure
from penstock.http.message import render
from penstock.http.upstream import Upstream
from penstock.hub.home import penstock_home
from penstock.router.routes import BASE, version_of
from penstock.tenancy.fleet import PoolStatus
from penstock.tenancy.routes import WHOLE
from penstock.tenancy.store import open_store

log = logging.getLogger("penstock")

_DOWN_S = 30.0
_NOTICE_S = 5.0


def run_fleet(config: Path, store: str | None, chosen: Mapping[str, str | None]) -> None:
    """Runs the controller until a signal ends it. `chosen`: settings that flags have instead of the file."""
    with fleet_settings(config, chosen) as settings, _template(settings):
        uvloop.run(_run(settings, store_url(store or settings.store, None)))
    given = {"config": str(config), **chosen}
    flags = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    own_store = " --store …" if store is not None else ""  # its URL may have a password
    down = f"penstock fleet down {shlex.join(flags)}{own_store}"
    print(f"the controller ends; its replicas go on. `{down}` stops them", flush=True)


@contextmanager
def _template(settings: FleetSettings) -> Iterator[None]:
    """The process that replicas of this machine are forked from, where they are its own."""
    if settings.driver != "local":
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as directory,
        TemplateProcess.start(template_modules(), Path(directory)),
    ):
        yield


def run_down(config: Path, store: str | None, chosen: Mapping[str, str | None]) -> None:
    with fleet_settings(config, chosen) as settings:
        uvloop.run(_down(settings, store_url(store or settings.store, None)))


@contextmanager
def fleet_settings(config: Path, chosen: Mapping[str, str | None] | None = None) -> Iterator[FleetSettings]:
    """The file's settings; what is wrong with them is told with its line, also if it is found inside."""
    file = read_config_file(config)
    with file.located():
        given = {name: value for name, value in (chosen or {}).items() if value is not None}
        settings = build(FleetSettings, {**file.values, **given})
        if not settings.pools:
            raise ConfigError("a fleet has at least one pool", param="pools")
        for name, pool in settings.pool_settings().items():
            replica_settings(name, pool, settings.slo_of(name, pool))
        check_driver(settings)
        if settings.gateway is not None:
            models = gateway_settings(settings, "").pools()
            with within("gateway."):
                pools_of(models), routes_of(models)
        yield settings


async def _run(settings: FleetSettings, url: str) -> None:
    directory = fleet_directory(settings.name)
    secret = _secret(directory)
    driver = open_driver(settings, directory, secret)
    client = _client(settings, secret)
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    with open_store(url) as store:
        keeper = open_lease(settings, store.fleet)
        controller = Controller(settings, store, driver, client, keeper=keeper, on_change=_Lines().show)
        tasks = [asyncio.create_task(controller.run())]
        if settings.gateway is not None:
            gateway = GatewayKeeper(directory / "gateway", gateway_settings(settings, url), secret)
            tasks.append(asyncio.create_task(gateway.run(lambda: controller.is_leader)))
            print(f"the gateway's log: {gateway.log_path}", flush=True)
        if settings.interruption_url is not None and isinstance(driver, LocalDriver):
            tasks.append(asyncio.create_task(_watch_notices(settings.interruption_url, driver)))
        ended = asyncio.create_task(told.wait())
        try:
            await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, ended):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            client.close()
            await driver.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _watch_notices(url: str, driver: LocalDriver) -> None:
    """Asks a metadata endpoint again and again. One that does not answer has no notice."""
    parts = urlsplit(url)
    upstream, target = Upstream.from_url(f"{parts.scheme}://{parts.netloc}"), (parts.path or "/").encode()
    while True:
        answer = await fetch(upstream, target, render([(b"metadata-flavor", b"Google")]), timeout_s=_NOTICE_S)
        if not isinstance(answer, Failure):
            seconds = seconds_left(answer.status, answer.body, time.time())
            if seconds is not None:
                await asyncio.to_thread(driver.interrupt_spot, seconds)
        await asyncio.sleep(_NOTICE_S)


async def _down(settings: FleetSettings, url: str) -> None:
    directory = fleet_directory(settings.name)
    secret = _secret(directory)
    driver = open_driver(settings, directory, secret)
    with open_store(url) as store:
        keeper = open_lease(settings, store.fleet)
        controller = Controller(settings, store, driver, _client(settings, secret), keeper=keeper)
        await controller.stop_all(_DOWN_S, 2 * settings.lease_s)
        await driver.close()
        if settings.gateway is not None:
            await GatewayKeeper(directory / "gateway", gateway_settings(settings, url), secret).stop(_DOWN_S)
    print("the gateway and all replicas are stopped")


def gateway_settings(settings: FleetSettings, url: str) -> GatewaySettings:
    """Settings of the gateway in front of the fleet's pools; the file may say more."""
    values: dict[str, Any] = dict(settings.gateway or {})
    models = dict(values.get("models") or {})
    # Replicas of other pools are of a model that another pool brings.
    pools = {name: pool for name, pool in settings.pool_settings().items() if pool.serves in (None, name)}
    versioned = {model for model, version in map(version_of, pools) if version != BASE}
    for name, pool in pools.items():
        own: dict[str, Any] = {"secret_env": SECRET_VARIABLE, "slo": pool.slo, **settings.replica_tls.of_a_gateway}
        if pool.price_per_hour:
            own["price"] = {"replica_hour": pool.price_per_hour}
        model, version = version_of(name)
        given = dict(models.get(model) or {})
        if model in versioned:
            versions = dict(given.get("versions") or {})
            models[model] = given | {"versions": versions | {version: own | (versions.get(version) or {})}}
        else:
            models[model] = own | given
    for model in versioned:
        versions = models[model]["versions"]
        if not any("weight" in one for one in versions.values()):
            first = next(version for other, version in map(version_of, pools) if other == model)
            versions[first] = {**versions[first], "weight": WHOLE}
    values = {"slo": asdict(settings.slo), **values, "models": models, "store": url}
    found = build(GatewaySettings, values, where="gateway.")
    return replace(found, pipelines=[str(Path(path).absolute()) for path in found.pipelines])  # its file lies elsewhere


def _client(settings: FleetSettings, secret: str) -> ReplicaClient:
    tls = settings.replica_tls
    return ReplicaClient(secret, tls=tls.context(), server_name=tls.server_name)


def fleet_directory(name: str) -> Path:
    return penstock_home() / "fleet" / name


def _secret(directory: Path) -> str:
    """The secret of the fleet's replicas: chosen once, so that a later controller knows it too."""
    if chosen := os.environ.get(SECRET_VARIABLE):
        return chosen
    path = directory / "secret"
    make_private(directory)
    with contextlib.suppress(FileExistsError), open(path, "xb", opener=_private) as file:
        file.write(secrets.token_urlsafe(32).encode())
    return path.read_text()


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


class _Lines:
    """A line in the terminal whenever a pool has changed."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def show(self, statuses: Sequence[PoolStatus]) -> None:
        for status in statuses:
            states = ", ".join(f"{count} {state}" for state, count in sorted(status.states.items())) or "no replicas"
            line = f"{status.pool}: {states}; wanted {status.wanted}"
            if self._last.get(status.pool) != line:
                self._last[status.pool] = line
                print(f"{line} ({status.reason})" if status.reason else line, flush=True)
