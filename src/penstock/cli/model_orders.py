"""`penstock models load|unload|park|pin|unpin|warm-up --server URL`: orders to a server whose models share a device."""

from __future__ import annotations

import argparse
import http.client
import os
import sys
import time
from typing import Any
from urllib.parse import quote

from penstock.api.model_order import LOOK_S, MODELS_PATH, FollowedOrder, ModelSeen
from penstock.cli.store_flags import print_json, show_time
from penstock.core.converter import Converter
from penstock.core.errors import Conflict, EngineUnavailable, InvalidValue

_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 30.0
_model_seen_converter = Converter(ModelSeen)


def add_server_flags(parser: argparse.ArgumentParser, *, needed: bool) -> None:
    """`needed`: the command is about a server in any case."""
    default = f"default: $PENSTOCK_URL, or {_URL}" if needed else "without it: of this machine's disk"
    parser.add_argument("--server", metavar="URL", help=f"of a server whose models share a device ({default})")
    parser.add_argument("--key", metavar="KEY", help="an admin's key; better in $PENSTOCK_ADMIN_KEY")


def add_order_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("name", metavar="NAME", help="the model's name at the server")
    add_server_flags(parser, needed=True)
    if verb in ("unload", "park"):
        parser.add_argument("--drain", action="store_true", help="let its streams end first; else they refuse it")
    parser.add_argument("--wait", action="store_true", help="until it is done")


def run_order(arguments: argparse.Namespace) -> None:
    server, verb = _Server(arguments), arguments.verb
    body = {"drain": True} if getattr(arguments, "drain", False) else {}
    model = server.ask("POST", f"/{quote(arguments.name, safe='')}/{verb}", body)
    if arguments.wait:
        model = _wait(server, arguments.name, verb, model)
    _show([model], as_json=arguments.json)


def pin_at(arguments: argparse.Namespace) -> None:
    """`penstock models pin NAME… --server URL`, and unpin."""
    server = _Server(arguments)
    found = [server.ask("POST", f"/{quote(name, safe='')}/{arguments.verb}", {}) for name in arguments.models]
    _show(found, as_json=arguments.json)


def list_at(arguments: argparse.Namespace) -> None:
    found = _Server(arguments).ask("GET", "")
    if arguments.json:
        print_json(found)
        return
    _show(found["models"], as_json=False)
    for one in found["devices"]:
        held, total = _gib(one["held_bytes"]), _gib(one["total_bytes"])
        print(f"{one['name']}: {held} of {total} held; a model stays for {one['min_residence_s']:g} s at least")


def _wait(server: _Server, name: str, verb: str, model: dict[str, Any]) -> dict[str, Any]:
    """Returns the model once it is what was ordered. Raises EngineFailed, Conflict."""
    order = FollowedOrder(verb, _model_seen_converter.convert(model))
    while not order.is_done(_model_seen_converter.convert(model)):
        time.sleep(LOOK_S)
        model = server.ask("GET", f"/{quote(name, safe='')}")
    return model


class _Server:
    def __init__(self, arguments: argparse.Namespace) -> None:
        url = arguments.server or os.environ.get("PENSTOCK_URL") or _URL
        self._url = url if "://" in url else f"http://{url}"
        key = arguments.key or os.environ.get("PENSTOCK_ADMIN_KEY")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The answer's JSON. Raises what the server said."""
        import msgspec

        from penstock.http.ask import ask

        content = None if body is None else msgspec.json.encode(body)
        try:
            found = ask(self._url, method, MODELS_PATH + path, content, headers=self._headers, timeout_s=_TIMEOUT_S)
            answer = msgspec.json.decode(found.body)
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise EngineUnavailable(f"{self._url} cannot be reached, or is no penstock server: {error}") from None
        if found.status in (200, 202):
            return answer
        refusal = answer.get("error", {}) if isinstance(answer, dict) else {}
        if not isinstance(refusal, dict):
            refusal = {"message": str(refusal)}
        said = refusal.get("message", "")
        if found.status == 404 and refusal.get("code") == "not_found":
            said = "this server has no such API here: is the admin API on a port of its own (admin_port)?"
        kind = Conflict if found.status == 409 else InvalidValue
        raise kind(said or f"{self._url} answered {found.status}")


def _show(models: list[dict[str, Any]], *, as_json: bool) -> None:
    from penstock.terminal.tables import print_table

    if as_json:
        print_json(models)
    elif models:
        print_table(("MODEL", "STATE", "ORDER", "ETA", "MEMORY", "AT IT", "LAST USED"), [_row(one) for one in models])
        for one in models:
            if why := one["failure"] or one["refusal"] or one["no_room"]:
                print(why if why.startswith(one["name"]) else f"{one['name']}: {why}", file=sys.stderr)
    else:
        print("no models share a device here", file=sys.stderr)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["name"],
        one["state"] + (", pinned" if one["pinned"] else ""),
        one["order"] or "-",
        "-" if one["eta_s"] is None else f"{one['eta_s']:.1f} s",
        _gib(one["memory"]["held_bytes"]),
        str(one["in_flight"]),
        show_time(one["used_at"]),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
