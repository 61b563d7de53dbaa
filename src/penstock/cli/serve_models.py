"""`penstock serve A=MODEL B=MODEL`: several models behind one address, each in an engine process of its own.

It is a fleet with one pool for each model, whose controller and gateway are this process, and whose pools share the
device. The engines end when it does, however it ends.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import uvloop

from penstock.cli.before_serving import check_generating, check_torch, tls_of
from penstock.cli.config_file import read_config_file
from penstock.cli.gateway_process import Opened
from penstock.cli.model_names import NamedModel
from penstock.cli.model_needs import Device, needs_of, shared_device, tensor_needs
from penstock.cli.pipeline import load_pipelines
from penstock.cli.replicas import shared_secret, template_modules
from penstock.cli.serve_fleet import name_of_its_own, of_replicas, run_fleet
from penstock.cli.serve_tensors import UNDERSTOOD, refuse_others
from penstock.core.config import build, within
from penstock.core.cores import usable_cores
from penstock.core.errors import ConfigError, EngineFailed
from penstock.core.residency import Wish, gib
from penstock.core.settings import EngineSettings, ServerSettings, Settings
from penstock.core.slo import Slo
from penstock.engine_process.spawn import TemplateProcess
from penstock.fleet.residency.memory_plan import ModelNeeds, beside, refusal
from penstock.fleet.residency.policy import Rules
from penstock.fleet.residency.settings import ModelEntry, ModelsSettings
from penstock.fleet.residency.shared_device import SharedDevice
from penstock.fleet.settings import FleetSettings
from penstock.gateway.settings.gateway import LOOPBACK, GatewaySettings
from penstock.hub.resolve import default_name
from penstock.link.mps import start_mps
from penstock.server.ready import client_url, loading_message
from penstock.tenancy.fleet import FleetReplica, PoolStatus
from penstock.tensors.repository import is_repository, is_tensor_model, open_directory

_NEVER_S = 1e9  # streams of a model that leaves are waited for
_EVERY_S = 0.5  # a client that waits for its model waits for several rounds: drain, leave, load


def read_models(settings: Settings, named: Sequence[NamedModel], file: Path | None) -> ModelsSettings:
    """The models of the command line, and those of a file. Raises ConfigError."""
    if settings.server.name is not None:
        raise ConfigError("several models have a name each: NAME=MODEL", param="server.name")
    given = [(one.name or default_name(one.model), one.model) for one in named]
    for name, count in Counter(name for name, _ in given).items():
        if count > 1:
            raise ConfigError(
                f"there are {count} models with the name {name}: NAME=MODEL gives one another", param="model"
            )
    if file is None:
        return ModelsSettings(models=dict(given))
    found = read_config_file(file)
    with found.located():
        models = found.values.get("models") or {}
        if not isinstance(models, dict):
            raise ConfigError("they are a mapping from names to models", param="models")
        for name, _ in given:
            if name in models:
                raise ConfigError(f"the model {name} is in this file already", param=f"models.{name}")
        settings_of_models = build(ModelsSettings, found.values | {"models": models | dict(given)})
        settings_of_models.entries()
        return settings_of_models


def serve_models(
    settings: Settings, models: ModelsSettings, num_processes: int = 1, pipelines: Sequence[str] = ()
) -> None:
    """Serves until a signal ends it. `settings`: those of all models, and of the port; `num_processes`: of the gateway;
    `pipelines`: their files."""
    tls_of(settings.server)
    load_pipelines(pipelines)  # what is wrong with one is told at once
    if settings.server.client_ca is not None:
        raise ConfigError("client_ca is for one replica; a gateway knows its clients by their keys", param="client_ca")
    each = {name: _settings_of(name, entry, settings) for name, entry in models.entries().items()}
    device = shared_device(settings.engine, models.memory_gib)
    takes_tensors = {name for name, entry in models.entries().items() if is_tensor_model(entry.model)}
    if takes_tensors != models.models.keys():
        check_torch()
    needs, lines = [], []
    for name, entry in models.entries().items():
        with _naming(name):
            if is_repository(entry.model):
                raise ConfigError(f"{entry.model} has several models: name each, as in NAME={entry.model}/MODEL")
            if name in takes_tensors:
                refuse_others(each[name].engine)
                directory_of_model = open_directory(entry.model)
                needs.append(tensor_needs(name, entry, each[name].engine, directory_of_model, device))
                lines.append(f"loading {name} from {directory_of_model.path}")
                continue
            files = check_generating(each[name])
            needs.append(needs_of(name, entry, each[name], files, device))
            lines.append(loading_message(name, each[name], files.path))
    print(*lines, *check_plan(device, needs, models), sep="\n", flush=True)
    rules = Rules(
        device.for_models_bytes,
        min_residence_s=models.min_residence_s,
        load_on_use=models.load_on_use,
        idle_s=models.idle_s,
        parks=models.parks,
        one_at_a_time=device.is_gpu,
    )
    pinned = [name for name, entry in models.entries().items() if entry.pinned]
    shared = SharedDevice(device.name, rules, needs, pinned, device.fit)
    with (
        shared_secret(settings.server.gateway_secret),
        name_of_its_own() as fleet_name,
        tempfile.TemporaryDirectory(prefix="penstock-") as directory,
        _side_by_side(device, models),
        TemplateProcess.start(template_modules(), Path(directory)),
    ):
        fleet = _fleet(fleet_name, settings, models, each, takes_tensors)
        admin_port = models.admin_port
        if admin_port is None and settings.server.host not in LOOPBACK:
            admin_port = 0
        uvloop.run(
            run_fleet(settings, fleet, Path(directory), num_processes, _Lines, shared, pipelines, admin_port=admin_port)
        )


@contextmanager
def _side_by_side(device: Device, models: ModelsSettings) -> Iterator[None]:
    """Engines that are started within it share a GPU by MPS, if there is one."""
    if not (device.is_gpu and models.mps and len(models.models) > 1):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as directory:
        if start_mps(Path(directory)):
            print("kernels of the models run side by side, by MPS", flush=True)
        yield


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the model's name in front of errors about its settings."""
    try:
        with within(f"models.{name}."):
            yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", param=error.param) from None


def check_plan(device: Device, needs: Sequence[ModelNeeds], models: ModelsSettings) -> list[str]:
    """The memory plan in words. Raises ConfigError for a model that can never be loaded, and for pinned ones that do
    not fit together."""
    room_bytes = device.for_models_bytes
    entries = models.entries()
    pinned = {one.name: one.least_bytes for one in needs if entries[one.name].pinned}
    lines = [f"memory plan of {device.name}, {gib(room_bytes)} for models:"]
    for one in needs:
        staying = {name: held_bytes for name, held_bytes in pinned.items() if name != one.name}
        if why := refusal(room_bytes, one, staying):
            raise ConfigError(f"{why}. Pin fewer models, or make them smaller", param=f"models.{one.name}")
        kv_cache = f", and a KV cache of {gib(one.floor_bytes)} and more" if one.most_bytes else ""
        lines.append(f"  {one.name}: {gib(one.fixed_bytes)}{kv_cache}")
    together = [one.name for one in beside(room_bytes, [], sorted(needs, key=lambda one: one.name not in pinned))]
    others = [one.name for one in needs if one.name not in together]
    lines.append(f"  loaded at the start: {', '.join(together)}" + (f"; by use: {', '.join(others)}" if others else ""))
    return lines


def _settings_of(name: str, entry: ModelEntry, settings: Settings) -> Settings:
    """Settings of one model's replica: its own over those of all models."""
    where = f"models.{name}."
    of_all = asdict(settings.engine)
    if is_tensor_model(entry.model):  # those of models that make text are not for it, unless its own entry says them
        of_all = {key: value for key, value in of_all.items() if key in UNDERSTOOD}
    engine = build(EngineSettings, of_all | entry.engine, where=f"{where}engine.")
    server = build(ServerSettings, asdict(settings.server) | entry.server, where=f"{where}server.")
    slo = build(Slo, asdict(settings.slo) | entry.slo, where=f"{where}slo.")
    return replace(settings, model=entry.model, engine=engine, server=server, slo=slo)


def _fleet(
    fleet_name: str, settings: Settings, models: ModelsSettings, each: dict[str, Settings], takes_tensors: set[str]
) -> FleetSettings:
    pools: dict[str, dict[str, Any]] = {}
    for name, own in each.items():
        threads = own.engine.threads or max(1, usable_cores() // len(each))
        pools[name] = {
            "model": own.model,
            "tensors": name in takes_tensors,
            "engine": asdict(replace(own.engine, threads=threads, parkable=True)),
            "server": of_replicas(own.server),
            "slo": asdict(own.slo),
            "min": 0,
            "max": 1,
            "hold_s": models.hold_s,
            "drain_timeout_s": _NEVER_S,
        }
    return FleetSettings(name=fleet_name, slo=settings.slo, pools=pools, every_s=_EVERY_S)


class _Lines:
    """Lines in the terminal: how to use it once a first model is there, and each change of a model's state."""

    def __init__(self, gateway: GatewaySettings, opened: asyncio.Future[Opened]) -> None:
        self._gateway = gateway
        self._opened = opened
        self._began_s = asyncio.get_running_loop().time()
        self._is_ready = False
        self._last: dict[str, str] = {}
        self.cannot_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises why

    def show_failure(self, row: FleetReplica, failure: str) -> None:
        """A model that cannot be loaded costs the others nothing, unless there are none."""
        if self._is_ready:
            print(f"{row.pool}: {failure}", flush=True)
        elif row.ready_at is None and not self.cannot_start.done():
            self.cannot_start.set_exception(EngineFailed(f"{row.pool}: {failure}"))

    def show(self, statuses: Sequence[PoolStatus]) -> None:
        if not self._opened.done():
            return
        for status in statuses:
            if status.residency is None or (state := status.residency.state) == self._last.get(status.pool):
                continue
            seconds = asyncio.get_running_loop().time() - self._began_s
            why = status.residency.reason if self._is_ready else ""  # until then: that it was named
            print(f"{seconds:8.1f} s  {status.pool}: {state}{f': {why}' if why else ''}", flush=True)
            self._last[status.pool] = state
        is_settled = all(status.residency and status.residency.wish != Wish.LOAD for status in statuses)
        if not self._is_ready and is_settled:
            self._is_ready = True
            print(self._ready([status.pool for status in statuses]), flush=True)

    def _ready(self, models: Sequence[str]) -> str:
        opened = self._opened.result()
        url = client_url(opened.listener, is_tls=self._gateway.tls_cert is not None)
        key = " -H 'authorization: Bearer KEY'" if opened.has_tenants else ""
        message = '{"role":"user","content":"Why is the sky blue?"}'
        body = f'{{"model":"{models[0]}","stream":true,"temperature":0,"messages":[{message}]}}'
        return f"""
penstock serves {", ".join(models)} at {url}

Try it:

  curl -N {url}/v1/chat/completions{key} -d '{body}'
"""
