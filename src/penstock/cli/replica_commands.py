"""`penstock replicas`: the replicas that gateways have besides those in their files, on every gateway at once.

`park` and `wake` need no store: they ask the replica itself, of whatever engine it is.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import time
from typing import Any

from penstock.api.relay import SECRET_HEADER, SECRET_VARIABLE
from penstock.cli.store_flags import add_store_flags, print_json, show_time, store_from
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.tenancy.replicas import OPTIONS, ReplicaRow
from penstock.terminal.tables import print_table

_BY = "command"
_ASK_S = 600.0  # beyond what a park may wait: a large model takes its time, of some engines


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in {
        "list": "the replicas in the store; those of a gateway's file are in `penstock top`",
        "add": "a replica for a model; a model that no gateway knows yet appears with its first replica",
        "drain": "send it nothing new; its streams go on elsewhere",
        "undrain": "use it again",
        "remove": "forget it; what it works on may end",
        "park": "give its device's memory back; its processes stay alive",
        "wake": "take the memory again, until a token has come out",
        "interrupt": "give one of this machine's fleet an interruption notice, as a spot market does: for drills",
    }.items():
        command = verbs.add_parser(verb, help=text)
        if verb == "add":
            command.add_argument("model", metavar="MODEL", help="or MODEL@VERSION")
        if verb != "list":
            what = "http://HOST:PORT" + (", or the replica's id" if verb == "interrupt" else "")
            command.add_argument("url", metavar="URL", help=what)
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
        elif verb == "interrupt":
            wait = "how long until it is killed (default: 30)"
            command.add_argument("--seconds", type=float, default=30.0, metavar="SECONDS", help=wait)
            continue
        elif verb in ("park", "wake"):
            _add_parking_flags(command, parks=verb == "park")
            continue
        elif verb != "list":
            command.add_argument("--model", metavar="MODEL", help="in this pool only")
        add_store_flags(command)


def _add_parking_flags(command: argparse.ArgumentParser, *, parks: bool) -> None:
    if parks:
        wait = "how long open requests may take to end or to go elsewhere (default: 30)"
        command.add_argument("--wait-s", type=float, default=30.0, metavar="SECONDS", help=wait)
    command.add_argument("--dialect", metavar="NAME", help="what it speaks (default: it is found out)")
    secret = f"a variable with a penstock replica's gateway_secret (default: {SECRET_VARIABLE})"
    command.add_argument("--secret-env", default=SECRET_VARIABLE, metavar="NAME", help=secret)
    command.add_argument("--key-env", metavar="NAME", help="a variable with an API key, for engines that want one")
    command.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> None:
    if arguments.verb in ("park", "wake"):
        _change_state(arguments)
        return
    if arguments.verb == "interrupt":
        from penstock.fleet.drivers.local import interrupt
        from penstock.hub.home import penstock_home

        replica = interrupt(penstock_home() / "fleet", arguments.url, arguments.seconds)
        print(f"{replica} is taken away in {arguments.seconds:g} s")
        return
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


def _change_state(arguments: argparse.Namespace) -> None:
    from penstock.dialects import parking
    from penstock.dialects.engines import DIALECTS
    from penstock.dialects.liveness import Answer
    from penstock.http.ask import ask

    if arguments.dialect is not None and arguments.dialect not in DIALECTS:
        raise ConfigError(f"there is no dialect '{arguments.dialect}'; those that are: {', '.join(DIALECTS)}")
    dialect = DIALECTS[arguments.dialect] if arguments.dialect is not None else None
    headers = {"content-type": "application/json"}
    if secret := os.environ.get(arguments.secret_env):
        headers[SECRET_HEADER] = secret
    if arguments.key_env is not None:
        headers["authorization"] = f"Bearer {os.environ.get(arguments.key_env, '')}"

    async def ask_replica(method: str, path: str, body: bytes | None) -> Answer:
        found = ask(arguments.url, method, path, body, headers=headers, timeout_s=_ASK_S)
        named = {name.encode(): value.encode() for name, value in found.headers.items()}
        return Answer(found.status, named, found.body)

    began_s = time.monotonic()
    try:
        if arguments.verb == "park":
            report = asyncio.run(parking.park(ask_replica, dialect, wait_s=arguments.wait_s))
        else:
            report = asyncio.run(parking.wake(ask_replica, dialect))
    except (OSError, http.client.HTTPException) as error:
        raise EngineUnavailable(f"{arguments.url} cannot be reached: {error}") from None
    if arguments.json:
        print_json(report)
        return
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in report.seconds.items())
    memory = f", {report.num_bytes / (1 << 30):.2f} GiB" if report.num_bytes else ""
    took = f"{time.monotonic() - began_s:.3f} s{f' ({phases})' if phases else ''}"
    print(f"{arguments.url}: {report.state} after {took}{memory}")


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
