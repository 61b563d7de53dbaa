"""`penstock serve x.onnx`: a model that takes tensors, and an HTTP server in front of it, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from penstock.cli import sd_notify
from penstock.cli.before_serving import tls_of
from penstock.cli.serve import HttpServer, OnReady, listen, with_secrets, write_address
from penstock.core.measurements import ServingLimits
from penstock.core.settings import Settings
from penstock.engine.client import startup_phases
from penstock.engine.messages import EngineInfo
from penstock.engine_process.phases import Phases, process_began_s
from penstock.server.ready import client_url
from penstock.tensors.repository import ModelDirectory, open_directory

if TYPE_CHECKING:
    from penstock.tensors.replica import TensorReplica
    from penstock.tensors.served_model import ServedModel

log = logging.getLogger("penstock")


def serve_tensors(settings: Settings, *, on_ready: OnReady | None = None, address_file: Path | None = None) -> None:
    """Until a signal ends it; arguments as those of `serve`."""
    phases = Phases("python", began_s=process_began_s())
    phases("check")
    settings = replace(settings, server=with_secrets(settings.server))
    directory = open_directory(settings.model)
    tls_of(settings.server)
    with listen(settings) as listener:
        if address_file is not None:
            write_address(address_file, client_url(listener, is_tls=settings.server.tls_cert is not None))
        phases("http")
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_serve(settings, directory, listener, phases, on_ready))


async def _serve(
    settings: Settings, directory: ModelDirectory, listener: socket.socket, phases: Phases, on_ready: OnReady | None
) -> None:
    from penstock.tensors import loading  # ONNX Runtime comes with it
    from penstock.tensors.replica import TensorReplica

    name = settings.server.name or directory.name
    replica = TensorReplica(name, settings.server, int(time.time()))
    tls = tls_of(settings.server)
    server = HttpServer(replica, replica.drain, replica, None, settings.server, tls=tls, tensors=replica)
    grpc_line = await server.listen_grpc()
    if on_ready is None:
        print(*filter(None, (f"loading {name} from {directory.path}", grpc_line)), sep="\n", flush=True)

    async def load() -> None:
        phases("load")
        loaded = await asyncio.to_thread(loading.load, directory)
        phases.close()
        replica.open(loading.serve(name, loaded, observer=replica.recorder), phases.seconds)

    serving, opening = asyncio.create_task(server.serve(listener)), asyncio.create_task(load())
    try:
        await asyncio.wait((serving, opening), return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            url = client_url(listener, is_tls=tls is not None)
            took = f"ready in {sum(phases.seconds.values()):.2f} s: {startup_phases(phases.seconds)}"
            if on_ready is None:
                print(_ready_message(replica.model(), url, took), flush=True)
            else:
                log.info(took)
                on_ready(_info(replica))
            sd_notify.notify(sd_notify.READY)
            await serving
    finally:
        opening.cancel()
        server.stop()
        await asyncio.gather(serving, opening, return_exceptions=True)
        await replica.stop()


def _info(replica: TensorReplica) -> EngineInfo:
    """For the process that started several of these."""
    instance = replica.model().latest.instances[0]
    return EngineInfo(
        instance.device,
        "as in its file",
        "none",
        "none",
        "onnxruntime",
        ServingLimits(),
        0,
        startup_s=dict(replica.startup_s),
        generates=False,
    )


def _ready_message(model: ServedModel, url: str, took: str) -> str:
    latest = model.latest
    rules, signature = latest.rules, latest.signature
    delay_ms = 1e3 * rules.max_queue_delay_s
    batches = f"up to {rules.max_batch_size} rows, after {delay_ms:g} ms at the latest" if rules.joins else "none"
    lines = {
        "versions": ", ".join(map(str, model.versions)),
        "inputs": ", ".join(f"{one.name} {one.datatype}{list(one.dims)}" for one in signature.inputs),
        "outputs": ", ".join(f"{one.name} {one.datatype}{list(one.dims)}" for one in signature.outputs),
        "batches": batches,
        "instances": f"{len(latest.instances)} on {latest.instances[0].device}",
    }
    shown = "\n".join(f"  {label:<15} {value}" for label, value in lines.items())
    return f"""
penstock serves {model.name} at {url}   ({took})

{shown}

  curl {url}/v2/models/{model.name}
"""
