"""Checks that need no engine: whatever keeps a model from being served is told before a process is started for it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from penstock.core.context import longest_context
from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings, ServerSettings, Settings
from penstock.core.speculating import kind_of
from penstock.http.tls import ServerTls
from penstock.hub.encoder import EncoderCheckpoint
from penstock.hub.peft import read_peft
from penstock.hub.resolve import ModelFiles, describe, resolve
from penstock.hub.watermarks import WatermarkFile
from penstock.tensors.repository import ModelDirectory, is_repository, is_tensor_model, open_directory
from penstock.terminal.progress import ProgressBar


def check_torch() -> None:
    if find_spec("torch") is None:
        raise ConfigError("serving a model needs torch: pip install 'penstock[engine]'")


def check(settings: Settings) -> ModelFiles | ModelDirectory:
    """The model's files, fetched if they have to be. Raises what is wrong with the settings, the cheapest first."""
    tls_of(settings.server)
    if is_tensor_model(settings.model):
        return open_directory(settings.model)
    if is_repository(settings.model):
        said = "a repository of several models is served by one process: penstock serve DIR, without others beside it"
        raise ConfigError(said, param="model")
    return check_generating(settings)


def check_generating(settings: Settings) -> ModelFiles:
    """The same of a model that takes no tensors."""
    kind_of(settings.engine, overlaps=False)
    if settings.server.watermark is not None:
        WatermarkFile.at(settings.server.watermark_file).find(settings.server.watermark)
    for adapter in settings.server.lora.values():
        read_peft(Path(adapter))
    find = describe if settings.engine.load == "dummy" else resolve
    files = find(settings.model, progress=ProgressBar())
    if isinstance(files, EncoderCheckpoint):
        _check_one_rank(settings.engine)
    else:
        longest_context(settings.engine, files.config)
    if settings.engine.kv_port is not None and (settings.engine.nnodes or 1) > 1:
        raise ConfigError("KV transfer needs all ranks on one machine: leave kv_port out", param="kv_port")
    if settings.engine.draft is not None:
        resolve(settings.engine.draft, progress=ProgressBar())  # so that its download is seen
    return files


def _check_one_rank(settings: EngineSettings) -> None:
    for name in ("tp", "pp", "ep", "sp"):
        if (asked := getattr(settings, name) or 1) > 1:
            raise ConfigError(f"{name} is {asked}, and a model that makes vectors alone has one rank", param=name)


def tls_of(settings: ServerSettings) -> ServerTls | None:
    if settings.tls_cert is not None:
        return ServerTls(settings.tls_cert, settings.tls_key, settings.client_ca)
    if settings.tls_key is not None or settings.client_ca is not None:
        raise ConfigError("TLS needs a certificate: tls_cert", param="server.tls_cert")
    return None
