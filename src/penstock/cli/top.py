"""`penstock top`: the console's fleet view in a terminal, of a gateway or of a single `penstock serve`."""

from __future__ import annotations

import argparse
import os

_URL = "http://127.0.0.1:8000"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help=f"where the console is (default: $PENSTOCK_URL, or {_URL})")
    parser.add_argument("--key", metavar="KEY", help="an admin's key; better in $PENSTOCK_ADMIN_KEY")
    parser.add_argument("--once", action="store_true", help="print how things stand as plain text, and end")


def run(arguments: argparse.Namespace) -> None:
    from penstock.console.top.live import show

    url = arguments.url or os.environ.get("PENSTOCK_URL") or _URL
    show(url, arguments.key or os.environ.get("PENSTOCK_ADMIN_KEY"), once=arguments.once)
