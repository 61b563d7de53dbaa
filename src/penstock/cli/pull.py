"""`penstock pull MODEL`: a model into the cache. Its path is all that goes to standard output."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an alias, or hf:org/name")


def run(arguments: argparse.Namespace) -> None:
    from penstock.hub.resolve import resolve
    from penstock.terminal.progress import ProgressBar

    print(resolve(arguments.model, progress=ProgressBar()).path)
