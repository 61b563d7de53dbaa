"""`penstock serve MODEL`: an engine process, an HTTP server in front of it, and a few lines that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop
from msgspec.structs import replace as replaced

from penstock.api.page_guard import is_loopback
from penstock.api.relay import SECRET_VARIABLE
from penstock.cli import sd_notify
from penstock.cli.before_serving import check_generating, check_torch, tls_of
from penstock.cli.device_watch import watch_devices
from penstock.cli.grpc_port import grpc_of_replica
from penstock.cli.node import serve_node, share_ranks_secret
from penstock.cli.telemetry import pushed_metrics, replica_traces
from penstock.console.at_replica import ConsoleAtReplica, with_console
from penstock.console.feed import Feed
from penstock.core.clock import MonotonicClock
from penstock.core.errors import ConfigError, ModelUnsupported
from penstock.core.nodes import nodes_of, with_nodes
from penstock.core.settings import ServerSettings, Settings
from penstock.engine.client import EngineClient, startup_phases
from penstock.engine.messages import EngineInfo
from penstock.engine_process.phases import Phases, process_began_s
from penstock.engine_process.spawn import ChildProcess, spawn
from penstock.http.asgi import Application, AsgiApp
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.cors import Cors
from penstock.http.limits import ClientLimits
from penstock.http.server import App, Server
from penstock.http.tls import ServerTls
from penstock.hub.hf_images import image_processor
from penstock.hub.resolve import ModelFiles, default_name
from penstock.observe.gpu.sampling import Sampling
from penstock.observe.otlp.environment import telemetry_of
from penstock.observe.registry import Registry
from penstock.oip.calls import Calls
from penstock.oip.over_http import OverHttp
from penstock.oip.tensor_calls import RepositoryCalls, TensorCalls
from penstock.server.app import Replica
from penstock.server.drain import Drain
from penstock.server.loading import LoadingProgress
from penstock.server.ready import client_url, loading_message, ready_message
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedImages, ServedModel
from penstock.tensors.repository import is_repository, is_tensor_model
from penstock.terminal.progress import PhaseBars
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.websocket.endpoint import PATHS, WebSockets

OnReady = Callable[[EngineInfo], None]
_BEFORE_ENGINE = ("python", "check", "http")  # phases of a start
_LORAS = 8  # adapters on the device, if some are named and nobody says how many
_GOODBYE_S = 10  # for telling clients that the server stops, once they have had their time


def serve(
    settings: Settings,
    *,
    has_console: bool = False,
    on_ready: OnReady | None = None,
    address_file: Path | None = None,
) -> None:
    """Serves until a signal ends it. `has_console`: nobody stands in front of it, so it has a page of its own.
    `on_ready`: is told what the engine found, instead of whoever reads the terminal. `address_file`: gets its URL once
    the port is its own. A node that is not the first of its replica has neither: it runs some of the ranks."""
    if is_tensor_model(settings.model) or is_repository(settings.model):
        from penstock.cli.serve_tensors import serve_tensors

        serve_tensors(settings, has_console=has_console, on_ready=on_ready, address_file=address_file)
        return
    phases = Phases("python", began_s=process_began_s())
    phases("check")
    check_torch()
    settings = replace(settings, server=with_secrets(settings.server))
    nodes = nodes_of(settings.engine, os.environ)
    settings = replace(settings, engine=with_nodes(settings.engine, nodes))
    if nodes.count > 1:
        share_ranks_secret(settings.server.gateway_secret)
        if on_ready is None:
            print(f"nodes: {nodes}", flush=True)
    if nodes.rank > 0:
        serve_node(settings, nodes)
        return
    with listen(settings) as listener:
        if address_file is not None:
            write_address(address_file, client_url(listener, is_tls=settings.server.tls_cert is not None))
        tls_of(settings.server)
        files = check_generating(settings)
        phases("http")
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_serve(settings, files, listener, phases, has_console, on_ready))


def with_secrets(settings: ServerSettings) -> ServerSettings:
    """Settings with the secrets from the environment, where a command line or file names none."""
    return replace(
        settings,
        gateway_secret=settings.gateway_secret or os.environ.get(SECRET_VARIABLE),
        metrics_token=settings.metrics_token or os.environ.get("PENSTOCK_METRICS_TOKEN"),
    )


async def _serve(
    settings: Settings,
    files: ModelFiles,
    listener: socket.socket,
    phases: Phases,
    has_console: bool,
    on_ready: OnReady | None,
) -> None:
    clock, pushed = MonotonicClock(), telemetry_of(settings.telemetry, "penstock-replica")
    name = settings.server.name or default_name(settings.model)
    recorder = Recorder(clock, name, settings.slo)
    bars = PhaseBars() if on_ready is None and sys.stdout.isatty() else None
    progress = LoadingProgress(clock, _say if on_ready is None else _say_nothing, bars)
    engine = EngineClient(
        lambda theirs: launch(settings, theirs),
        clock,
        on_loading=progress,
        on_report=recorder.engine_report,
    )
    replica = Replica(engine, recorder, clock, settings.server)
    app: Replica | ConsoleAtReplica = replica
    feed: Feed | None = None
    if has_console:
        is_local = is_loopback(settings.server.host)
        app, feed = with_console(replica, recorder, name, settings.slo, is_loopback=is_local)
    tls = tls_of(settings.server)
    sockets = partial(
        WebSockets, admit=replica.trust.admit_socket, pages=replica.trust.pages, registry=recorder.registry
    )
    server = HttpServer(app, replica.drain, engine, feed, settings.server, tls=tls, front=sockets)
    grpc_line = await server.listen_grpc()
    if on_ready is None:
        print(*filter(None, (loading_message(name, settings, files.path), grpc_line)), sep="\n", flush=True)
    # Health is answered while the model loads; a signal ends both, and so does a model that cannot be loaded.
    pushing = contextlib.AsyncExitStack()
    pushing.enter_context(replica_traces(pushed, recorder, engine))
    await pushing.enter_async_context(pushed_metrics(pushed, lambda: _look(replica, recorder)))
    serving = asyncio.create_task(server.serve(listener))
    loading = asyncio.create_task(_load(name, files, engine, replica, settings.server, phases))
    sampling: Sampling | None = None
    try:
        await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            info = loading.result()
            progress.end(is_ready=True)
            took = f"ready in {sum(info.startup_s.values()):.2f} s: {startup_phases(info.startup_s)}"
            sampling = watch_devices(info, settings.server, replica.devices.take)
            if on_ready is not None:
                logging.getLogger("penstock").info(took)
                on_ready(info)
            else:
                url = client_url(listener, is_tls=tls is not None)
                print(ready_message(name, info, url, took, has_console=has_console), flush=True)
            sd_notify.notify(sd_notify.READY)
            await serving
    finally:
        progress.end(is_ready=False)
        if sampling is not None:
            sampling.stop()
        loading.cancel()
        server.stop()
        await asyncio.gather(serving, loading, return_exceptions=True)
        await engine.stop()
        await pushing.aclose()


def _look(replica: Replica, recorder: Recorder) -> list[Registry]:
    replica.look()
    return [recorder.registry]


async def _load(
    name: str, files: ModelFiles, engine: EngineClient, replica: Replica, settings: ServerSettings, phases: Phases
) -> EngineInfo:
    """Open the replica. The engine's process loads the weights while this one builds the tokenizer."""
    source = files.tokenizer_source
    phases.close()
    starting = asyncio.create_task(engine.start())
    starting.add_done_callback(lambda _: phases.resume("tokenizer"))
    info, tokenizer = await asyncio.gather(starting, asyncio.to_thread(Tokenizer.load, source))
    phases("open")
    model = ServedModel(
        name=name,
        config=files.config,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(
            source.chat_template,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            tool_format=None if settings.tool_format == "auto" else settings.tool_format,
            reasoning_format=None if settings.reasoning_format == "auto" else settings.reasoning_format,
        ),
        max_model_len=info.limits.max_model_len,
        created=int(time.time()),
        generates=info.generates,
        embeds=info.embeds,
        max_loras=info.max_loras,
        images=_served_images(files, tokenizer, info),
    )
    adapters = replica.adapters(model)
    await adapters.restore(settings.lora)
    replica.open(model, adapters)
    phases.close()
    engine.info = _with_server_phases(info, phases)
    return engine.info


def _served_images(files: ModelFiles, tokenizer: Tokenizer, info: EngineInfo) -> ServedImages | None:
    """None: the model takes no images here. If it could, the log says why it does not."""
    if not info.takes_images:
        return None
    log = logging.getLogger("penstock")
    try:
        processor = image_processor(files.path, files.config.vision)
    except ModelUnsupported as error:
        log.warning("requests with images are refused: %s", error.message)
        return None
    if processor is None:
        log.warning("requests with images are refused: %s has no preprocessor_config.json", files.path)
        return None
    placeholder_id = tokenizer.added_id(processor.placeholder)
    if placeholder_id is None:
        log.warning("requests with images are refused: the tokenizer has no token %s", processor.placeholder)
        return None
    return ServedImages(processor, placeholder_id, info.max_image_tokens)


def _with_server_phases(info: EngineInfo, phases: Phases) -> EngineInfo:
    """Phases of a replica's whole start, in their order: the server's lie around the engine's."""

    def around(inner: dict[str, float], outer: dict[str, float]) -> dict[str, float]:
        before = {name: spent for name, spent in outer.items() if name in _BEFORE_ENGINE}
        return before | inner | {name: spent for name, spent in outer.items() if name not in before}

    return replaced(
        info,
        startup_s=around(info.startup_s, phases.seconds),
        startup_cpu_s=around(info.startup_cpu_s, phases.cpu_seconds),
    )


def for_engine(settings: Settings) -> Settings:
    """The settings that the engine's process is told. Arguments are for all to see, and a server's settings hold a
    secret: of those it needs to know no more than that there are adapters, which a GPU has no room for unless told."""
    engine = settings.engine
    if engine.max_loras is None and settings.server.lora:
        engine = replace(engine, max_loras=_LORAS)
    return replace(settings, engine=engine, server=ServerSettings())


async def launch(settings: Settings, theirs: socket.socket) -> ChildProcess:
    """The engine's process, with its end of the socket."""
    encoded = msgspec.json.encode(for_engine(settings)).decode()
    return await spawn("penstock.engine_process", [str(theirs.fileno()), encoded], pass_fds=[theirs.fileno()])


class Stoppable(Protocol):
    """Work behind a server, such as an engine."""

    async def stop(self) -> None: ...


class HttpServer:
    """An HTTP server. Told to stop, it takes no new work and lets the rest finish for a while, or go on elsewhere,
    which gateways must be able to ask for: so it listens until then. Then it stops the engine, and that ends
    everything. Told a second time, it stops the engine at once."""

    def __init__(
        self,
        app: Application,
        drain: Drain,
        engine: Stoppable,
        feed: Feed | None,
        settings: ServerSettings,
        clock: TimerClock = LOOP_CLOCK,
        *,
        tls: ServerTls | None = None,
        front: Callable[[App], App] = lambda app: app,
        tensors: TensorCalls | None = None,
        repository: RepositoryCalls | None = None,
    ) -> None:
        """`clock`: of the limits on slow clients. `front`: puts something in front of the application. `tensors`: of
        models that take tensors, `repository`: which come and go by call."""
        self._app = AsgiApp(app)
        calls = Calls(self._app, max_body_bytes=settings.max_body_bytes, tensors=tensors, repository=repository)
        self._grpc = grpc_of_replica(settings, calls)
        limits, cors = ClientLimits(max_body_bytes=settings.max_body_bytes), Cors.of(settings.allowed_origins)
        app_and_calls = OverHttp(self._app, calls)
        self._server = Server(front(app_and_calls), limits, clock, cors=cors, upgrades=PATHS)
        self._drain = drain
        self._engine = engine
        self._feed = feed
        self._tls = tls
        self._drain_timeout_s = settings.drain_timeout_s
        self._told, self._told_again = asyncio.Event(), asyncio.Event()

    async def listen_grpc(self) -> str | None:
        """Opens the gRPC port and returns where it is, in words; None: there is none. Raises ConfigError."""
        return None if self._grpc is None else await self._grpc.listen()

    def stop(self) -> None:
        (self._told_again if self._told.is_set() else self._told).set()

    async def serve(self, listener: socket.socket) -> None:
        """Serves until it is told to stop, by `stop` or by a signal."""
        loop = asyncio.get_running_loop()
        handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), self.stop)
        if self._tls is not None:
            handlers[signal.SIGHUP] = self._renew
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            await self._serve(listener)
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    async def _serve(self, listener: socket.socket) -> None:
        async with self._app.lifespan():
            await self._server.listen(listener, tls=self._tls)
            await self._told.wait()
            sd_notify.notify(sd_notify.STOPPING)
            self._drain.begin(is_stopping=True)
            if self._feed is not None:
                self._feed.close()
            loop = asyncio.get_running_loop()
            stopped_at = loop.time() + self._drain_timeout_s + _GOODBYE_S
            ending, idle = loop.create_task(self._end_requests()), loop.create_task(self._drain.wait_idle())
            try:
                await asyncio.wait((ending, idle), return_when=asyncio.FIRST_COMPLETED)
                grace_s = max(0.0, stopped_at - loop.time())
                stops = [self._server.stop(grace_s)] + ([self._grpc.stop(grace_s)] if self._grpc is not None else [])
                await asyncio.gather(*stops)
            finally:
                ending.cancel()
                idle.cancel()

    def _renew(self) -> None:
        """Reads the certificate again, for new connections."""
        assert self._tls is not None
        try:
            self._tls.reload()
        except ConfigError as error:
            logging.getLogger("penstock").error("the certificate stays as it is: %s", error.message)

    async def _end_requests(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told_again.wait(), self._drain_timeout_s)
        await self._engine.stop()


def listen(settings: Settings) -> socket.socket:
    """Bound before anything is fetched or loaded, so that a port in use is told at once."""
    host, port = settings.server.host, settings.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        hint = "; try --port 0" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from None
    if not is_loopback(host) and not settings.server.gateway_secret:
        log = logging.getLogger("penstock")
        log.warning("listening on %s without a gateway_secret: anyone who can reach it can use it", host)
    return listener


def write_address(path: Path, url: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_bytes(msgspec.json.encode({"url": url, "pid": os.getpid()}))
    draft.rename(path)


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(line: str) -> None:
    """The process that started several replicas says how far they are."""
