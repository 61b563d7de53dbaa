"""`penstock gateway`: the public endpoint in front of replicas and providers that run already."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from penstock.core.errors import ConfigError

_URL = "http://127.0.0.1:8000"


def add_gateway(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("gateway", help="the public endpoint: keys, limits, queues, and replicas behind it")
    command.add_argument(
        "action",
        nargs="?",
        choices=["reload"],
        help="reload: a gateway that runs reads its file again (models, routing and objectives), without dropping a "
        "stream; SIGHUP does the same",
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML: see docs/gateway.md")
    command.add_argument(
        "--url", metavar="URL", help=f"reload: where its admin API is (default: $PENSTOCK_URL, or {_URL})"
    )
    command.add_argument("--key", metavar="KEY", help="reload: an admin's key; better in $PENSTOCK_ADMIN_KEY")
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
    if arguments.action == "reload":
        _reload(arguments)
    elif arguments.config is None:
        raise ConfigError("a gateway needs its configuration: --config FILE", param="config")
    else:
        _serve(arguments)


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


def _serve(arguments: argparse.Namespace) -> None:
    import uvloop

    from penstock.cli.config_file import read_config_file
    from penstock.cli.gateway_process import serve
    from penstock.cli.store_flags import store_url
    from penstock.core.config import build
    from penstock.gateway.membership.factory import replicas_of
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

    def read() -> GatewaySettings:
        file = read_config_file(arguments.config)
        with file.located(given):
            settings = build(GatewaySettings, file.values | given)
            replicas_of(settings.pools(), settings.health)  # what is wrong is told with its line
            return settings

    file = read_config_file(arguments.config)
    with file.located(given):
        settings = build(GatewaySettings, file.values | given)
        uvloop.run(serve(settings, store_url(settings.store, None), read=read))
