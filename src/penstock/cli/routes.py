"""`penstock routes`: how the traffic of a model is shared between its versions, on every gateway at once."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.store_flags import add_store_flags, print_json, show_time, store_from
from penstock.tenancy.documents import route_document
from penstock.tenancy.routes import RouteInForce, RouteRevision, shares_asked
from penstock.tenancy.store import Store
from penstock.terminal.tables import print_table

_BY = "command"


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in {
        "list": "all models with versions, as gateways have declared them",
        "show": "one model: its shares, and every change to them",
        "weights": "change the shares that are named, and leave the rest",
        "promote": "all traffic to one version",
        "rollback": "back to how it was before the last change; again: before that one",
    }.items():
        command = verbs.add_parser(verb, help=text)
        if verb != "list":
            command.add_argument("model", metavar="MODEL")
        if verb == "weights":
            command.add_argument("weights", nargs="*", type=_share, metavar="VERSION=WEIGHT", help="v2=10; v2=file")
            command.add_argument(
                "--shadow",
                action="append",
                type=_share,
                default=[],
                metavar="VERSION=SHARE",
                help="send it a copy of this share of what others answer: v2=0.05",
            )
        elif verb == "promote":
            command.add_argument("version", metavar="VERSION")
        elif verb == "rollback":
            command.add_argument("--to", type=_revision, metavar="REVISION", help="a revision of `show`, or `file`")
        add_store_flags(command)


def run(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        if arguments.verb == "list":
            _list(store.routes.all(), arguments.json)
            return
        rollout = store.rollouts.on_for(arguments.model)
        if rollout is not None:  # also where JSON is asked for: programs do not read this
            print(
                f"rollout {rollout.id} of {rollout.model} to {rollout.new} is on ({rollout.phase})"
                + ("" if arguments.verb == "show" else ": it pauses, and leaves these shares until it is resumed"),
                file=sys.stderr,
            )
        if arguments.verb == "show":
            _show(store.routes.show(arguments.model), store.routes.history(arguments.model), arguments.json)
        else:
            _tell(_changed(store, arguments), arguments.json)


def _changed(store: Store, arguments: argparse.Namespace) -> RouteInForce:
    match arguments.verb:
        case "weights":
            asked = shares_asked({"weights": dict(arguments.weights), "shadow": dict(arguments.shadow)})
            return store.routes.change(arguments.model, asked, by=_BY)
        case "promote":
            return store.routes.promote(arguments.model, arguments.version, by=_BY)
        case _:
            return store.routes.roll_back(arguments.model, arguments.to, by=_BY)


def _tell(route: RouteInForce, as_json: bool) -> None:
    if as_json:
        print_json(route_document(route))
    else:
        print(f"{route.declared.name}: {_shares(route)} (revision {route.last.revision})")


def _list(routes: list[RouteInForce], as_json: bool) -> None:
    if as_json:
        print_json([route_document(route) for route in routes])
        return
    if not routes:
        print("no gateway has declared a model with versions: give one `versions` in its file")
        return
    print_table(
        ("MODEL", "SHARES", "REVISION", "CHANGED"),
        [
            (one.declared.name, _shares(one), str(one.last.revision or "file"), show_time(one.last.at or None))
            for one in routes
        ],
    )


def _show(route: RouteInForce, history: list[RouteRevision], as_json: bool) -> None:
    if as_json:
        print_json(route_document(route) | {"history": history})
        return
    total, file = sum(route.weights.values()), route.declared
    print_table(
        ("VERSION", "WEIGHT", "PERCENT", "SHADOW", "IN THE FILE"),
        [
            (
                version,
                f"{weight:g}",
                f"{100 * weight / total:.1f}",
                f"{route.shadow.get(version, 0.0):g}",
                f"{file.weights[version]:g}",
            )
            for version, weight in route.weights.items()
        ],
    )
    if history:
        print()
        print_table(
            ("REVISION", "AT", "BY", "CHANGE", "WEIGHTS"),
            [
                (str(one.revision), show_time(one.at), one.by or "-", one.action, _pairs(one.weights) or "-")
                for one in history
            ],
        )


def _shares(route: RouteInForce) -> str:
    shadows = {version: share for version, share in route.shadow.items() if share}
    return _pairs(route.weights) + (f", shadow {_pairs(shadows)}" if shadows else "")


def _pairs(shares: dict[str, float]) -> str:
    return " ".join(f"{version}={share:g}" for version, share in shares.items())


def _share(text: str) -> tuple[str, float | None]:
    version, equals, value = text.partition("=")
    if not (version and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not VERSION=NUMBER")
    try:
        return version, None if value == "file" else float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is no number") from None


def _revision(text: str) -> int:
    if text == "file":
        return 0
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no revision")
    return int(text)
