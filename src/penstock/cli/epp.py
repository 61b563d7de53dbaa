"""`penstock epp`: an Endpoint Picker for gateways built on Envoy, with a gateway's file and no public port."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.gateway.settings.gateway import GatewaySettings

_SECTION = "endpoint_picker"
_OWN = ("host", "port", "health_port", "secure", "tls_cert", "tls_key")
_SHARED = ("admin_host", "admin_port", "request_log", "store")


def add_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML of `penstock gateway`: docs/endpoint-picker.md"
    )
    command.add_argument("--host", help="address to listen on")
    command.add_argument("--port", type=int, help="port of the ext_proc service (default: 9002); 0 picks a free one")
    command.add_argument("--health-port", type=int, help="port of the gRPC health service (default: 9003)")
    command.add_argument("--admin-host", help="address of the admin port (default: 127.0.0.1)")
    command.add_argument("--admin-port", type=int, help="port of /metrics and the admin API (default: 9090)")
    command.add_argument(
        "--secure", action=argparse.BooleanOptionalAction, default=None, help="TLS on the ext_proc port (default: yes)"
    )
    command.add_argument(
        "--tls-cert", metavar="FILE", help="PEM file of the certificate; default: one that signs itself"
    )
    command.add_argument("--tls-key", metavar="FILE", help="PEM file of its private key; default: in the same file")
    command.add_argument(
        "--request-log", action=argparse.BooleanOptionalAction, default=None, help="a line in the log for each request"
    )
    command.add_argument("--store", metavar="URL", help="where routes, replicas and the fleet's demand are")
    command.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def run(arguments: argparse.Namespace) -> None:
    import uvloop

    import penstock.gateway.endpoint_picker.server  # noqa: F401 - the extra is missed before anything is opened
    from penstock.cli.gateway_process import read_again, serve
    from penstock.cli.store_flags import store_url

    if arguments.config is None:
        raise ConfigError("an endpoint picker needs a gateway's configuration: --config FILE", param="config")
    given = {name: value for name in (*_OWN, *_SHARED) if (value := getattr(arguments, name)) is not None}
    with _settings(arguments.config, given) as settings:
        read = partial(read_again, partial(_settings, arguments.config, given))
        uvloop.run(serve(settings, store_url(settings.store, None), read=read, picks=True))


@contextmanager
def _settings(config: Path, given: dict[str, Any]) -> Iterator[GatewaySettings]:
    """The file's settings with the flags that are `given`: some are for its section of this name."""
    from penstock.cli.config_file import read_config_file
    from penstock.core.config import build
    from penstock.gateway.settings.gateway import GatewaySettings

    file = read_config_file(config)
    own = {name: value for name, value in given.items() if name in _OWN}
    shared = {name: value for name, value in given.items() if name in _SHARED}
    section = file.values.get(_SECTION) or {}
    with file.located(given):
        settings = build(GatewaySettings, file.values | shared | {_SECTION: section | own})
        if settings.admin_port is None:
            settings = replace(settings, admin_port=settings.endpoint_picker.metrics_port)
        yield settings
