"""`penstock replicas`: the replicas that gateways have besides those in their files, on every gateway at once."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.store_flags import add_store_flags, print_json, show_time, store_from
from penstock.tenancy.replicas import OPTIONS, ReplicaRow
from penstock.terminal.tables import print_table

_BY = "command"


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in {
        "list": "the replicas in the store; those of a gateway's file are in `penstock top`",
        "add": "a replica for a model; a model that no gateway knows yet appears with its first replica",
        "drain": "send it nothing new; its streams go on elsewhere",
        "undrain": "use it again",
        "remove": "forget it; what it works on may end",
    }.items():
        command = verbs.add_parser(verb, help=text)
        if verb == "add":
            command.add_argument("model", metavar="MODEL", help="or MODEL@VERSION")
        if verb != "list":
            command.add_argument("url", metavar="URL", help="http://HOST:PORT")
        if verb == "add":
            command.add_argument(
                "--option",
                action="append",
                type=_option,
                default=[],
                metavar="NAME=VALUE",
                help=f"a setting that is not its model's: {', '.join(OPTIONS)}",
            )
            drained = "it is sent nothing: drains one that a gateway's file or DNS names, until `remove`"
            command.add_argument("--draining", action="store_true", help=drained)
        elif verb != "list":
            command.add_argument("--model", metavar="MODEL", help="in this pool only")
        add_store_flags(command)


def run(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        book = store.replicas
        match arguments.verb:
            case "list":
                rows = book.all()
            case "add":
                options = dict(arguments.option)
                from penstock.gateway.membership.store import check_options  # the gateway is much to import

                check_options(options)
                row = book.add(arguments.model, arguments.url, options, is_draining=arguments.draining, by=_BY)
                rows = [row]
            case "remove":
                rows = book.remove(arguments.url, arguments.model)
            case verb:
                rows = book.drain(arguments.url, arguments.model, is_draining=verb == "drain", by=_BY)
    if arguments.json:
        print_json(rows)
    elif arguments.verb == "list":
        _print(rows)
    else:
        done = {"add": "added", "drain": "draining", "undrain": "in use again", "remove": "removed"}[arguments.verb]
        for row in rows:
            print(f"{row.model} {row.url}: {done}")


def _print(rows: list[ReplicaRow]) -> None:
    if not rows:
        print("the store has no replicas: gateways have those of their files; add one with `penstock replicas add`")
        return
    print_table(
        ("MODEL", "URL", "STATE", "OPTIONS", "CHANGED", "BY"),
        [
            (
                row.model,
                row.url,
                row.state or ("draining" if row.is_draining else "active"),
                ",".join(f"{name}={value}" for name, value in row.options.items()) or "-",
                show_time(row.at),
                row.by or "-",
            )
            for row in rows
        ],
    )


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or name not in OPTIONS:
        raise argparse.ArgumentTypeError(f"NAME=VALUE, with a NAME of {', '.join(OPTIONS)}")
    return name, value
