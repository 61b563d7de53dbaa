"""Parts that the commands about tenants have in common: which store, and how to print."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, InvalidValue
from penstock.tenancy import times

if TYPE_CHECKING:
    from penstock.tenancy.store import Store


def add_store_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        metavar="URL",
        help="sqlite:///path or postgresql://user@host/name (default: the config's `store`, $PENSTOCK_STORE, or "
        "penstock.db in $PENSTOCK_HOME)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the gateway's YAML file; its `store` is used")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def store_url(flag: str | None, config: Path | None) -> str:
    from penstock.cli.config_file import read_config_file
    from penstock.hub.home import penstock_home

    configured = read_config_file(config).values.get("store") if config else None
    if configured is not None and not isinstance(configured, str):
        raise ConfigError(f"store in {config} is not a URL", param="store")
    default = f"sqlite:///{penstock_home().absolute() / 'penstock.db'}"
    return flag or configured or os.environ.get("PENSTOCK_STORE") or default


def store_from(arguments: argparse.Namespace) -> Store:
    from penstock.tenancy.store import open_store

    return open_store(store_url(arguments.store, arguments.config))


def print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def show_time(at_s: float | None) -> str:
    return "-" if at_s is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(at_s))


def duration(text: str) -> float:
    return _said(times.duration, text)


def moment(text: str) -> float:
    return _said(times.moment, text)


def _said(parse: Callable[[str], float], text: str) -> float:
    """argparse repeats the message of its own kind of error only."""
    try:
        return parse(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(error.message) from None
