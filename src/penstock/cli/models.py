"""`penstock models`: the weights cache of this machine, and models in and out of a server's device."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.cli.model_orders import add_order_flags, add_server_flags, list_at, pin_at, run_order
from penstock.cli.store_flags import print_json, show_time

if TYPE_CHECKING:
    from penstock.hub.cache.room import CachedModel
    from penstock.hub.cache.weights import WeightsCache


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="models with their sizes and last use, and the total against the limit")
    pull = verbs.add_parser("pull", help="fetch models; their paths go to standard output")
    remove = verbs.add_parser("rm", help="remove models that no process uses")
    pin = verbs.add_parser("pin", help="never remove models to make room for others")
    unpin = verbs.add_parser("unpin", help="let models be removed again")
    verify = verbs.add_parser("verify", help="read models and compare checksums; damaged files are fetched again")
    for command in (pull, remove, pin, unpin):
        command.add_argument(
            "models", nargs="+", metavar="MODEL", help="an alias, hf:org/name, or an https: or s3: URL"
        )
    verify.add_argument("models", nargs="*", metavar="MODEL", help="(default: all that are there)")
    for command in (listing, pin, unpin):
        add_server_flags(command, needed=False)
    orders = {
        "load": "have a server load a model into its device",
        "unload": "have a server unload a model, and not load it again before `load`",
        "park": "have a server give a model's memory back; it is awake again sooner than it would be loaded",
        "warm-up": "have a server load a model and compute a token with it",
    }
    ordering = {verb: verbs.add_parser(verb, help=text) for verb, text in orders.items()}
    for verb, command in ordering.items():
        add_order_flags(command, verb)
    for command in (listing, pull, remove, pin, unpin, verify, *ordering.values()):
        command.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> None:
    match arguments.verb:
        case "load" | "unload" | "park" | "warm-up":
            run_order(arguments)
            return
        case "list" if arguments.server is not None:
            list_at(arguments)
            return
        case "pin" | "unpin" if arguments.server is not None:
            pin_at(arguments)
            return
    from penstock.hub.sources import weights_cache

    cache = weights_cache()
    match arguments.verb:
        case "list":
            _list(cache, arguments.json)
        case "pull":
            _pull(cache, arguments.models, arguments.json)
        case "rm":
            _remove(cache, arguments.models, arguments.json)
        case "pin" | "unpin":
            _pin(cache, arguments.models, arguments.verb == "pin", arguments.json)
        case "verify":
            _verify(cache, arguments.models, arguments.json)


def _list(cache: WeightsCache, as_json: bool) -> None:
    from penstock.hub.cache.room import size
    from penstock.terminal.tables import print_table

    models, limit_bytes = cache.models(), cache.limit_bytes()
    total_bytes = sum(model.num_bytes for model in models)
    if as_json:
        documents = [_document(model) for model in models]
        print_json({"models": documents, "total_bytes": total_bytes, "limit_bytes": limit_bytes})
        return
    if models:
        head = ("MODEL", "SIZE", "STATE", "LAST USED", "FETCHED", "SECONDS")
        print_table(head, [_row(model, size(model.num_bytes)) for model in models])
    else:
        print("no models yet: penstock models pull smollm2", file=sys.stderr)
    print(f"{size(total_bytes)} of {size(limit_bytes)}")


def _row(model: CachedModel, num_bytes: str) -> tuple[str, ...]:
    states = [model.state] + ["pinned"] * model.pinned + ["in use"] * model.is_in_use
    seconds = "-" if model.fetch_s is None else f"{model.fetch_s:.1f}"
    return (
        model.model,
        num_bytes,
        ", ".join(states),
        show_time(model.last_used_at),
        show_time(model.fetched_at),
        seconds,
    )


def _pull(cache: WeightsCache, specs: list[str], as_json: bool) -> None:
    from penstock.hub.sources import fetched_source
    from penstock.terminal.progress import ProgressBar

    sources = [fetched_source(spec) for spec in specs]
    paths = [cache.ensure(source, ProgressBar()) for source in sources]
    if as_json:
        print_json([_document(model) for source in sources if (model := cache.cached(source)) is not None])
    else:
        print(*paths, sep="\n")


def _remove(cache: WeightsCache, specs: list[str], as_json: bool) -> None:
    from penstock.hub.cache.room import size
    from penstock.hub.sources import fetched_source

    removed = {source.spec: cache.remove(source) for source in map(fetched_source, specs)}
    if as_json:
        print_json([{"model": spec, "num_bytes": num_bytes} for spec, num_bytes in removed.items()])
    for spec, num_bytes in removed.items():
        print(f"removed {spec}, {size(num_bytes)}", file=sys.stderr)


def _pin(cache: WeightsCache, specs: list[str], pinned: bool, as_json: bool) -> None:
    from penstock.hub.sources import fetched_source

    for source in map(fetched_source, specs):
        cache.pin(source, pinned)
        print(f"{'pinned' if pinned else 'unpinned'} {source.spec}", file=sys.stderr)
    if as_json:
        print_json([{"model": spec, "pinned": pinned} for spec in specs])


def _verify(cache: WeightsCache, specs: list[str], as_json: bool) -> None:
    from penstock.hub.sources import fetched_source
    from penstock.terminal.progress import ProgressBar

    documents: list[dict[str, Any]] = []
    for spec in specs or [model.model for model in cache.models() if model.state == "complete"]:
        source, began_s = fetched_source(spec), time.monotonic()
        damaged = cache.verify(source, progress := ProgressBar())
        if damaged:
            print(f"{spec}: {', '.join(damaged)} damaged; fetching again", file=sys.stderr)
            cache.ensure(source, progress)
        documents.append({"model": spec, "damaged": damaged, "seconds": round(time.monotonic() - began_s, 3)})
        print(f"{spec}: {'fetched again and ' if damaged else ''}verified", file=sys.stderr)
    if as_json:
        print_json(documents)


def _document(model: CachedModel) -> dict[str, Any]:
    import msgspec

    return {key: value for key, value in msgspec.to_builtins(model, enc_hook=str).items() if key != "place"}
