"""`penstock gateway`: the public endpoint in front of replicas and providers that run already."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_gateway(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("gateway", help="the public endpoint: keys, limits, queues, and replicas behind it")
    command.add_argument("--config", type=Path, metavar="FILE", required=True, help="YAML: see docs/gateway.md")
    command.add_argument("--host", help="address to listen on")
    command.add_argument("--port", type=int, help="port to listen on; 0 picks a free one")
    command.add_argument("--admin-host", help="address of the admin port (default: 127.0.0.1)")
    command.add_argument("--admin-port", type=int, help="port of the admin API and /metrics; see the setting")
    command.add_argument("--tls-cert", metavar="FILE", help="PEM file of the certificate: TLS, read again on SIGHUP")
    command.add_argument("--tls-key", metavar="FILE", help="PEM file of its private key; default: in the same file")
    command.add_argument(
        "--request-log", action=argparse.BooleanOptionalAction, default=None, help="a line in the log for each request"
    )
    command.add_argument("--store", metavar="URL", help="where tenants, keys and usage are")
    command.add_argument("--allow-anonymous", action="store_true", default=None, help="see the setting of that name")
    command.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def run_gateway(arguments: argparse.Namespace) -> None:
    import uvloop

    from penstock.cli.config_file import read_config_file
    from penstock.cli.gateway_process import serve
    from penstock.cli.store_flags import store_url
    from penstock.core.config import build
    from penstock.gateway.settings.gateway import GatewaySettings

    names = (
        "host",
        "port",
        "admin_host",
        "admin_port",
        "request_log",
        "store",
        "allow_anonymous",
        "tls_cert",
        "tls_key",
    )
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    file = read_config_file(arguments.config)
    with file.located(given):
        settings = build(GatewaySettings, file.values | given)
        uvloop.run(serve(settings, store_url(settings.store, None)))
