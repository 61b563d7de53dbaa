"""`penstock serve MODEL --replicas N`, or `prefill=1,decode=2`: a gateway, and the replicas behind it as processes of
this machine.

With `--processes M` the gateway is so many processes too, and this one supervises them: the replicas go on when one of
them ends or is replaced.

The replicas are on loopback and the gateway's alone: they share a secret with it, a new one each time unless one is
set, which is in their environment and neither in their arguments nor in a file. A replica that dies is started again;
one that cannot be started at all ends everything, with the words that it would have alone.
They have a session of their own, so that a Ctrl-C reaches the gateway alone, which lets its streams end before it stops
them; and they end when it does, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from penstock.api.relay import SECRET_VARIABLE
from penstock.cli.before_serving import check, check_torch
from penstock.cli.gateway_process import Opened, serve
from penstock.cli.gateway_worker import Started, addresses_of
from penstock.cli.pipeline import load_pipelines
from penstock.cli.replica_counts import ReplicaCounts
from penstock.cli.start_report import read_report
from penstock.cli.store_flags import store_url
from penstock.cli.supervisor import Listeners, Supervisor
from penstock.core.cores import usable_cores
from penstock.core.errors import ConfigError, EngineFailed
from penstock.core.settings import Role, Settings
from penstock.engine.client import as_error, startup_phases
from penstock.engine.messages import EngineInfo, Failed, Ready
from penstock.engine_process.spawn import ChildProcess, TemplateProcess, spawn
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.settings.gateway import LOOPBACK, MIN_BODY_BYTES, GatewaySettings
from penstock.hub.home import penstock_home
from penstock.hub.resolve import ModelFiles, default_name
from penstock.router.legs import Split
from penstock.server.ready import client_url, loading_message, ready_message
from penstock.tensors.repository import ModelDirectory

log = logging.getLogger("penstock")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_STOP_S = 10.0
# Modules of both processes of a replica, those that are imported late among them.
_SERVER_MODULES = (
    "penstock.cli.main",
    "penstock.cli.engine_command",
    "penstock.cli.start_report",
    "penstock.cli.serve",
)
_ENGINE_MODULES = (
    "penstock.engine_process.__main__",
    "penstock.hub.resolve",
    "penstock.model.random_weights",
    "penstock.runner.assemble",
    "penstock.engine.guides",
    "penstock.model.ops.native_adapters",
    "penstock.sched.speculation.device_costs",
    "penstock.sched.speculation.ngram",
)
_GPU_MODULES = ("penstock.model.ops.triton", "penstock.runner.cuda_runner")
_NVIDIA_DRIVER = Path("/dev/nvidiactl")
_LOOK_S = 0.05  # how often the gateway is asked whether it has found a replica ready


def serve_replicas(
    settings: Settings,
    counts: ReplicaCounts,
    num_processes: int = 1,
    split: Split = "auto",
    pipelines: Sequence[str] = (),
) -> None:
    """Serves until a signal ends it, or a replica that cannot start. `num_processes`: of the gateway; `split`: its
    model's; `pipelines`: their files."""
    load_pipelines(pipelines)  # what is wrong with one is told at once
    check_torch()
    if settings.server.client_ca is not None:
        raise ConfigError("client_ca is for one replica; a gateway knows its clients by their keys", param="client_ca")
    with (
        shared_secret(settings.server.gateway_secret),
        tempfile.TemporaryDirectory(prefix="penstock-") as directory,
        TemplateProcess.start(template_modules(), Path(directory)),  # before all else: its imports take longest
        _reserved_ports(counts.most) as ports,
    ):
        files = check(settings)
        uvloop.run(_serve(settings, files, counts, ports, Path(directory), num_processes, split, pipelines))


def template_modules() -> list[str]:
    """Modules for a template to import. Importing Triton's touches no device; they are of use where there is a GPU."""
    modules = [*_SERVER_MODULES, *_ENGINE_MODULES]
    if _NVIDIA_DRIVER.exists():
        os.environ.setdefault("TRITON_CACHE_DIR", str(penstock_home() / "triton"))  # as `runner.kernels` has it
        modules += _GPU_MODULES
    return modules


@contextlib.contextmanager
def shared_secret(chosen: str | None) -> Iterator[None]:
    """Processes that are started meanwhile share the secret."""
    before = os.environ.get(SECRET_VARIABLE)
    os.environ[SECRET_VARIABLE] = chosen or before or secrets.token_urlsafe(32)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SECRET_VARIABLE]
        else:
            os.environ[SECRET_VARIABLE] = before


async def _serve(
    settings: Settings,
    files: ModelFiles | ModelDirectory,
    counts: ReplicaCounts,
    ports: list[int],
    directory: Path,
    num_processes: int,
    split: Split,
    pipelines: Sequence[str],
) -> None:
    name, store = settings.server.name or default_name(settings.model), store_url(None, None)
    replicas = [f"http://127.0.0.1:{port}" for port in ports]
    pool = {"replicas": replicas, "secret_env": SECRET_VARIABLE, "split": split}
    gateway = gateway_in_front(settings, store, {name: pool}, pipelines)
    opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
    tasks = [asyncio.create_task(run_gateway(gateway, store, directory, num_processes, opened.set_result))]
    start: _Start | None = None
    try:
        either: list[asyncio.Future[Any]] = [opened, *tasks]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            print(f"{loading_message(name, settings, files.path)} in {counts}", flush=True)
            start = _Start(name, gateway, opened.result(), len(ports))
            settings = with_transfer(settings, files)
            for port, role in zip(ports, counts.each_role, strict=True):
                config = _write_config(settings, name, port, role, len(ports), directory)
                tasks.append(asyncio.create_task(_keep(config, start.is_ready)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if start is not None:
            start.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def with_transfer(settings: Settings, files: ModelFiles | ModelDirectory) -> Settings:
    """Settings of replicas between which KV blocks go, at ports that they pick, if this model's can: a recurrent state
    lies in no block, and without a prefix cache none is found again."""
    has_states = not isinstance(files, ModelDirectory) and files.config.linear is not None
    if has_states or not settings.engine.prefix_cache:
        return settings
    return replace(settings, engine=replace(settings.engine, kv_port=0))


def gateway_in_front(
    settings: Settings, store: str, models: dict[str, dict[str, Any]], pipelines: Sequence[str] = ()
) -> GatewaySettings:
    """Settings of the gateway that clients meet where `serve` would be one replica."""
    server = settings.server
    return GatewaySettings(
        host=server.host,
        port=server.port,
        grpc_port=server.grpc_port,
        store=store,
        allowed_hosts=server.allowed_hosts,
        allowed_origins=server.allowed_origins,
        tls_cert=server.tls_cert,
        tls_key=server.tls_key,
        models=models,
        max_body_bytes=max(server.max_body_bytes, MIN_BODY_BYTES),
        pipelines=[str(Path(path).absolute()) for path in pipelines],
        slo=settings.slo,
        telemetry=settings.telemetry,
        batches=BatchSettings(files=str(penstock_home() / "files")),
    )


async def run_gateway(
    gateway: GatewaySettings, store: str, directory: Path, num_processes: int, on_open: Callable[[Opened], None]
) -> None:
    """A gateway in this process, or in several, until a signal ends it."""
    if num_processes > 1:
        await _supervise(gateway, directory, num_processes, on_open)
    else:
        read = (lambda: gateway) if gateway.pipelines else None  # their files are all that can change
        await serve(gateway, store, on_open, read=read)


async def _supervise(
    gateway: GatewaySettings, directory: Path, num_processes: int, on_open: Callable[[Opened], None]
) -> None:
    """The gateway as several processes, which end when this one does: their replicas are gone then."""
    config = directory / "gateway.yaml"
    config.write_bytes(msgspec.json.encode(asdict(gateway)))
    level = logging.getLevelName(log.getEffectiveLevel()).lower()
    command = ["gateway", "--config", str(config), "--log-level", level]
    listeners = Listeners.take_over(addresses_of(gateway), directory)
    supervisor = Supervisor(
        command,
        listeners,
        directory,
        num_processes,
        worker_timeout_s=gateway.worker_timeout_s,
        outlived_by_workers=False,
    )

    def opened(started: Started) -> None:
        print(*started.lines, sep="\n", flush=True)
        on_open(Opened(listeners.sockets[0], started.lines, started.has_tenants, supervisor.num_ready))

    await supervisor.run(opened)


class _Start:
    """Lines in the terminal about replicas, as the gateway finds each ready for the first time."""

    def __init__(self, name: str, gateway: GatewaySettings, opened: Opened, count: int) -> None:
        self._name = name
        self._gateway = gateway
        self._opened = opened
        self._count = count
        self._began_s = asyncio.get_running_loop().time()
        self._telling: asyncio.Task[None] | None = None

    def is_ready(self, info: EngineInfo) -> None:
        """A replica is, by its own word; `info` is much the same for all."""
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell(info))

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    async def _tell(self, info: EngineInfo) -> None:
        num_told = 0
        while num_told < self._count:
            if await self._opened.num_ready() <= num_told:
                await asyncio.sleep(_LOOK_S)
                continue
            num_told += 1
            seconds = asyncio.get_running_loop().time() - self._began_s
            took = f"{num_told} of {self._count} replicas ready in {seconds:.1f} s"
            print(took if num_told > 1 else self._message(info, took), flush=True)

    def _message(self, info: EngineInfo, took: str) -> str:
        return ready_message(
            self._name,
            info,
            client_url(self._opened.listener, is_tls=self._gateway.tls_cert is not None),
            f"{took}: {startup_phases(info.startup_s)}",
            has_console=self._gateway.host in LOOPBACK,
            num_replicas=self._count,
            needs_key=self._opened.has_tenants,
        )


def _write_config(settings: Settings, name: str, port: int, role: Role, count: int, directory: Path) -> Path:
    """JSON is YAML too. A role is about KV blocks that go between replicas: where these cannot, its engine says why."""
    threads = settings.engine.threads or max(1, usable_cores() // count)
    engine = replace(settings.engine, threads=threads)
    if role != "both":
        engine = replace(engine, kv_port=0)
    plain = replace(
        settings.server, tls_cert=None, tls_key=None, client_ca=None, grpc_port=None
    )  # on loopback, to their gateway
    server = replace(plain, host="127.0.0.1", port=port, name=name, role=role, gateway_secret=None)
    path = directory / f"replica-{port}.yaml"
    path.write_bytes(msgspec.json.encode(asdict(replace(settings, engine=engine, server=server))))
    return path


async def _keep(config: Path, on_ready: Callable[[EngineInfo], None]) -> None:
    """Run one replica until it is cancelled, and start it again when it ends. Raises why it cannot be started, if it
    never was: to try again would not help."""
    wait_s, has_been_ready = _FIRST_WAIT_S, False
    while True:
        started_s = asyncio.get_running_loop().time()
        process, report = await _start(config)
        try:
            told = await report
            if isinstance(told, Ready) and not has_been_ready:
                has_been_ready = True
                on_ready(told.info)
            code = await process.wait()
        except asyncio.CancelledError:
            await _stop(process)
            raise
        if not has_been_ready and isinstance(told, Failed):
            raise as_error(told.code, told.message)
        if not has_been_ready and code > 0:
            raise EngineFailed(f"a replica ended with status {code} before it was ready")
        if asyncio.get_running_loop().time() - started_s > _LONGEST_WAIT_S:
            wait_s = _FIRST_WAIT_S
        log.warning("a replica ended with status %s; it is started again in %.1f s", code, wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


async def _start(config: Path) -> tuple[ChildProcess, Coroutine[None, None, Ready | Failed | None]]:
    """A replica's process, and how its start ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        report = ["--log-level", "warning", "--report-fd", str(theirs.fileno())]
        process = await spawn(
            "penstock.cli.main",
            ["engine", "--config", str(config), *report],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            new_session=True,
        )
    return process, read_report(ours)


async def _stop(process: ChildProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


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
