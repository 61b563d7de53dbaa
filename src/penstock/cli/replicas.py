"""`penstock serve MODEL --replicas N`: a gateway, and the replicas behind it as processes of this machine.

The replicas are on loopback and the gateway's alone: they share a secret with it, a new one each time unless one is
set, which is in their environment and neither in their arguments nor in a file. A replica that dies is started again.
They have a session of their own, so that a Ctrl-C reaches the gateway alone, which lets its streams end before it stops
them; and they end when it does, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import uvloop

from penstock.api.relay import SECRET_VARIABLE
from penstock.cli.gateway_process import serve
from penstock.cli.store_flags import store_url
from penstock.core.errors import ConfigError
from penstock.core.settings import Settings
from penstock.gateway.settings import GatewaySettings
from penstock.hub.progress import ProgressBar
from penstock.hub.resolve import default_name, describe, resolve

log = logging.getLogger("penstock")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1


def serve_replicas(settings: Settings, count: int) -> None:
    """Until a signal ends it."""
    find = describe if settings.engine.load == "dummy" else resolve
    find(settings.model, progress=ProgressBar())  # once, and not by every replica
    name = settings.server.name or default_name(settings.model)
    share_secret(settings.server.gateway_secret)
    with _reserved_ports(count) as ports:
        uvloop.run(_serve(settings, name, ports, store_url(None, None)))


def share_secret(chosen: str | None) -> None:
    """The secret is shared with the processes that are started from here on."""
    os.environ[SECRET_VARIABLE] = chosen or os.environ.get(SECRET_VARIABLE) or secrets.token_urlsafe(32)


async def _serve(settings: Settings, name: str, ports: list[int], store: str) -> None:
    if settings.server.client_ca is not None:
        raise ConfigError("client_ca is for one replica; a gateway knows its clients by their keys", param="client_ca")
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    gateway = GatewaySettings(
        host=settings.server.host,
        port=settings.server.port,
        allowed_hosts=settings.server.allowed_hosts,
        tls_cert=settings.server.tls_cert,
        tls_key=settings.server.tls_key,
        models={name: {"replicas": urls, "secret_env": SECRET_VARIABLE}},
        slo=settings.slo,
        telemetry=settings.telemetry,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        keepers = [
            asyncio.create_task(_keep(_write_config(settings, name, port, len(ports), Path(directory))))
            for port in ports
        ]
        try:
            await serve(gateway, store)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


def _write_config(settings: Settings, name: str, port: int, count: int, directory: Path) -> Path:
    """JSON is YAML too."""
    threads = settings.engine.threads or max(1, len(os.sched_getaffinity(0)) // count)
    engine = replace(settings.engine, threads=threads)
    plain = replace(settings.server, tls_cert=None, tls_key=None, client_ca=None)  # on loopback, to their gateway
    server = replace(plain, host="127.0.0.1", port=port, name=name, gateway_secret=None)
    path = directory / f"replica-{port}.yaml"
    path.write_bytes(msgspec.json.encode(asdict(replace(settings, engine=engine, server=server))))
    return path


async def _keep(config: Path) -> None:
    """Runs one replica until it is cancelled."""
    wait_s = _FIRST_WAIT_S
    while True:
        started_s = asyncio.get_running_loop().time()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.cli.main",
            "engine",
            "--config",
            str(config),
            "--log-level",
            "warning",
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await _stop(process)
            raise
        if asyncio.get_running_loop().time() - started_s > _LONGEST_WAIT_S:
            wait_s = _FIRST_WAIT_S
        log.warning("a replica ended with status %s; it is started again in %.1f s", code, wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _die_with_parent() -> None:
    """In the child: Linux tells it when the gateway is gone, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports that stay these replicas' own, also while one of them is not there yet or is started again.

    On Linux they are bound here by sockets that never listen: a replica may bind the same port, as both say
    SO_REUSEADDR, and nobody is given it who asks for any port. Elsewhere its bind would fail, so they are let go.
    """
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        ports = [int(one.getsockname()[1]) for one in found]
        if sys.platform != "linux":
            stack.close()
        yield ports
