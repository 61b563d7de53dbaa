"""`penstock serve x.onnx`: models that take tensors, and an HTTP server in front of them, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from penstock.api.page_guard import is_loopback
from penstock.cli import sd_notify
from penstock.cli.before_serving import tls_of
from penstock.cli.serve import HttpServer, OnReady, listen, with_secrets, write_address
from penstock.console.at_replica import ConsoleAtReplica, with_console
from penstock.console.feed import Feed
from penstock.core.errors import ConfigError
from penstock.core.measurements import ServingLimits
from penstock.core.settings import EngineSettings, Settings
from penstock.engine.client import startup_phases
from penstock.engine.messages import EngineInfo
from penstock.engine_process.phases import Phases, process_began_s
from penstock.server.ready import client_url
from penstock.server.text_models import Task
from penstock.tensors.repository import is_repository, models_in, open_directory

if TYPE_CHECKING:
    from penstock.tensors.replica import TensorReplica
    from penstock.tensors.served_model import ServedModel

log = logging.getLogger("penstock")

_COLLECT = (20_000, 20, 50)  # objects until garbage is collected: requests leave no cycles
# Names of engines' settings; the last two are set for the replicas of `serve` and of fleets, whatever their models are.
UNDERSTOOD = ("device", "threads", "parkable", "kv_port")
_SWITCH_S = 5e-4  # that a thread which has computed a batch waits at most for the interpreter


def serve_tensors(
    settings: Settings,
    *,
    has_console: bool = False,
    on_ready: OnReady | None = None,
    address_file: Path | None = None,
) -> None:
    """Serves until a signal ends it; arguments as those of `serve`."""
    phases = Phases("python", began_s=process_began_s())
    phases("check")
    settings = replace(settings, server=with_secrets(settings.server))
    refuse_others(settings.engine)
    source = _source(settings)
    tls_of(settings.server)
    with listen(settings) as listener:
        if address_file is not None:
            write_address(address_file, client_url(listener, is_tls=settings.server.tls_cert is not None))
        phases("http")
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_serve(settings, source, listener, phases, has_console, on_ready))


class _Source(NamedTuple):
    name: str  # of the replica
    paths: Callable[[], Mapping[str, Path]]  # of its models, by name


def _source(settings: Settings) -> _Source:
    """Raises ModelMissing, ConfigError: for one model before anything is started, as it may be mistyped."""
    path, name = Path(settings.model), settings.server.name
    if not is_repository(settings.model):
        name = name or open_directory(settings.model).name
        return _Source(name, lambda: {name: path})
    if name is not None:
        said = f"{path} is a repository of several models, whose names are those of their directories"
        raise ConfigError(said, param="server.name")
    return _Source(path.resolve().name, lambda: models_in(path))


def refuse_others(engine: EngineSettings) -> None:
    """Settings of engines that make text mean nothing here."""
    for one in fields(engine):
        if one.name not in UNDERSTOOD and getattr(engine, one.name) != getattr(EngineSettings(), one.name):
            said = f"{one.name} is for models that make text; an ONNX model is as its file and its settings have it"
            raise ConfigError(said, param=f"engine.{one.name}")


async def _serve(
    settings: Settings,
    source: _Source,
    listener: socket.socket,
    phases: Phases,
    has_console: bool,
    on_ready: OnReady | None,
) -> None:
    from penstock.tensors.onnx_model import Place  # ONNX Runtime comes with it
    from penstock.tensors.replica import TensorReplica

    place = Place(settings.engine.device, settings.engine.threads)
    replica = TensorReplica(source.name, settings.server, int(time.time()), source.paths, place)
    tls = tls_of(settings.server)
    app: TensorReplica | ConsoleAtReplica = replica
    feed: Feed | None = None
    if has_console:
        is_local = is_loopback(settings.server.host)
        app, feed = with_console(replica, replica.recorder, source.name, settings.slo, is_loopback=is_local)
    server = HttpServer(
        app, replica.drain, replica, feed, settings.server, tls=tls, tensors=replica, repository=replica
    )
    grpc_line = await server.listen_grpc()
    if on_ready is None:
        print(*filter(None, (f"loading {source.name} from {settings.model}", grpc_line)), sep="\n", flush=True)

    async def load() -> None:
        phases("load")
        await replica.repository.load_all()
        phases.close()
        gc.freeze()  # what is loaded by now stays
        gc.set_threshold(*_COLLECT)
        sys.setswitchinterval(_SWITCH_S)
        replica.open(phases.seconds)

    serving, opening = asyncio.create_task(server.serve(listener)), asyncio.create_task(load())
    try:
        await asyncio.wait((serving, opening), return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            url = client_url(listener, is_tls=tls is not None)
            took = f"ready in {sum(phases.seconds.values()):.2f} s: {startup_phases(phases.seconds)}"
            if on_ready is None:
                print(_ready_message(replica, url, took, has_console=has_console), flush=True)
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
    """Returns the engine's facts for the process that started several of these."""
    model = next(iter(replica.repository.loaded.values()))
    instance, texts = model.latest.instances[0], model.texts
    embeds = not isinstance(texts, str) and "embeddings" in texts.tasks
    most = 0 if isinstance(texts, str) else texts.limits.max_tokens
    return EngineInfo(
        instance.device,
        "as in its file",
        "none",
        "none",
        "onnxruntime",
        ServingLimits(chunk_tokens=most * model.latest.rules.max_batch_size, max_model_len=most),
        0,
        startup_s=dict(replica.startup_s),
        generates=False,
        embeds=embeds,
    )


def _ready_message(replica: TensorReplica, url: str, took: str, *, has_console: bool) -> str:
    loaded = replica.repository.loaded
    blocks = [f"{name}\n{_shown(model)}" for name, model in loaded.items()]
    blocks += [
        f"{one['name']}\n  not loaded: {one['reason']}"
        for one in replica.repository.index()
        if one["state"] == "UNAVAILABLE"
    ]
    tries = "\n".join(f"  {_try_it(model, url)}" for model in list(loaded.values())[:3])
    in_browser = f"  in a browser: {url}\n" if has_console else ""
    return f"""
penstock serves {", ".join(loaded)} at {url}   ({took})

{_BETWEEN.join(blocks)}

{in_browser}{tries}
"""


_BETWEEN = "\n\n"


def _shown(model: ServedModel) -> str:
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
    if not isinstance(model.texts, str):
        lines["texts"] = f"{', '.join(model.texts.tasks)}; of {model.texts.limits.max_tokens} tokens at most"
    return "\n".join(f"  {label:<15} {value}" for label, value in lines.items())


def _try_it(model: ServedModel, url: str) -> str:
    if isinstance(model.texts, str):
        return f"curl {url}/v2/models/{model.name}"
    path, body = _EXAMPLES[model.texts.tasks[0]]
    return f'curl {url}{path} -d \'{{"model":"{model.name}",{body}}}\''


_EXAMPLES: dict[Task, tuple[str, str]] = {
    "embeddings": ("/v1/embeddings", '"input":"a cat"'),
    "relevance": ("/v1/rerank", '"query":"a pet","documents":["a cat","a car"]'),
    "classification": ("/v1/classify", '"input":"a cat"'),
}
