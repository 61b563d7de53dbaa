"""`penstock gateway`: the public endpoint in front of replicas and providers that run already."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.gateway.settings.gateway import GatewaySettings

_URL = "http://127.0.0.1:8000"


def add_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "action",
        nargs="?",
        choices=["reload", "restart"],
        help="of a gateway that runs: reload its file (models, routing, objectives) without dropping a stream, as "
        "SIGHUP does; restart its workers, one after another",
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML: see docs/gateway.md")
    command.add_argument(
        "--url", metavar="URL", help=f"reload: where its admin API is (default: $PENSTOCK_URL, or {_URL})"
    )
    command.add_argument("--key", metavar="KEY", help="reload: an admin's key; better in $PENSTOCK_ADMIN_KEY")
    command.add_argument("--processes", type=int, default=1, metavar="N", help="workers that share a port (default: 1)")
    command.add_argument("--worker", help=argparse.SUPPRESS)  # for a supervisor
    command.add_argument("--host", help="address to listen on")
    command.add_argument("--port", type=int, help="port to listen on; 0 picks a free one")
    command.add_argument("--grpc-port", type=int, help="port of the Open Inference Protocol over gRPC; see the setting")
    command.add_argument("--admin-host", help="address of the admin port (default: 127.0.0.1)")
    command.add_argument("--admin-port", type=int, help="port of the admin API and /metrics; see the setting")
    command.add_argument(
        "--tls-cert", metavar="FILE", help="PEM file of the certificate: TLS, read again when it changes"
    )
    command.add_argument("--tls-key", metavar="FILE", help="PEM file of its private key; default: in the same file")
    command.add_argument(
        "--request-log", action=argparse.BooleanOptionalAction, default=None, help="a line in the log for each request"
    )
    command.add_argument("--store", metavar="URL", help="where tenants, keys and usage are")
    command.add_argument("--allow-anonymous", action="store_true", default=None, help="see the setting of that name")
    command.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


_SETTINGS = (
    "host",
    "port",
    "grpc_port",
    "admin_host",
    "admin_port",
    "request_log",
    "store",
    "allow_anonymous",
    "tls_cert",
    "tls_key",
)


def run(arguments: argparse.Namespace) -> None:
    given = {name: value for name in _SETTINGS if (value := getattr(arguments, name)) is not None}
    if arguments.action == "reload":
        _reload(arguments)
    elif arguments.config is None:
        raise ConfigError("a gateway needs its configuration: --config FILE", param="config")
    elif arguments.action == "restart":
        _restart(arguments.config)
    elif arguments.worker is not None:
        _run_worker(arguments.config, given, arguments.worker)
    elif arguments.processes > 1:
        _supervise(arguments, given)
    else:
        _run_alone(arguments.config, given)


def _run_alone(config: Path, given: dict[str, Any]) -> None:
    import uvloop

    from penstock.cli.gateway_process import read_again, serve
    from penstock.cli.store_flags import store_url

    with _settings(config, given) as settings:
        read = partial(read_again, partial(_settings, config, given))
        uvloop.run(serve(settings, store_url(settings.store, None), read=read))


def _run_worker(config: Path, given: dict[str, Any], spec: str) -> None:
    import uvloop

    from penstock.cli.gateway_process import read_again, serve
    from penstock.cli.gateway_worker import GatewayWorker, Started, worker_spec_decoder
    from penstock.cli.store_flags import store_url

    worker = GatewayWorker(worker_spec_decoder.decode(spec))
    with worker.reporting() as tell, _settings(config, given) as settings:
        worker.check(settings)
        url = store_url(settings.store, None)
        read = partial(read_again, partial(_settings, config, given))
        uvloop.run(serve(settings, url, lambda opened: tell(Started(opened.lines, opened.has_tenants)), worker, read))


def _supervise(arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    import uvloop

    from penstock.cli.gateway_worker import addresses_of
    from penstock.cli.supervisor import Listeners, Supervisor, run_directory, sole_supervisor

    with _settings(arguments.config, given) as settings, sole_supervisor(run_directory(arguments.config)) as directory:
        listeners = Listeners.take_over(addresses_of(settings), directory)
        supervisor = Supervisor(
            _worker_command(arguments, given),
            listeners,
            directory,
            arguments.processes,
            worker_timeout_s=settings.worker_timeout_s,
        )
        uvloop.run(supervisor.run(lambda started: print(*started.lines, sep="\n", flush=True)))


def _worker_command(arguments: argparse.Namespace, given: dict[str, Any]) -> list[str]:
    words = ["gateway", "--config", str(arguments.config), "--log-level", arguments.log_level]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def _restart(config: Path) -> None:
    from penstock.cli.supervisor import restart_workers, run_directory

    process_id = restart_workers(run_directory(config))
    print(f"process {process_id} replaces its workers, one after another; its log says how that goes")


def _reload(arguments: argparse.Namespace) -> None:
    import json
    import urllib.request
    from urllib.error import HTTPError, URLError

    url = arguments.url or os.environ.get("PENSTOCK_URL") or _URL
    key = arguments.key or os.environ.get("PENSTOCK_ADMIN_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(f"{url.rstrip('/')}/admin/v1/reload", b"", headers, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            changed = json.load(answer)["changed"]
    except HTTPError as error:
        raise ConfigError(json.load(error)["error"]["message"]) from None
    except URLError as error:
        raise ConfigError(f"no gateway answers at {url}: {error.reason}") from None
    print("reloaded; changed:", ", ".join(changed) or "nothing")


@contextmanager
def _settings(config: Path, given: dict[str, Any]) -> Iterator[GatewaySettings]:
    """The file's settings with the flags that are `given`; an error that is raised inside has the file's line."""
    from penstock.cli.config_file import read_config_file
    from penstock.cli.pipeline import with_pipelines_beside
    from penstock.core.config import build
    from penstock.gateway.settings.gateway import GatewaySettings

    file = read_config_file(config)
    with file.located(given):
        yield with_pipelines_beside(config, build(GatewaySettings, file.values | given))
