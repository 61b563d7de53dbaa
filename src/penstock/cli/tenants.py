"""`penstock tenants`: who may use the service, and how much."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from penstock.cli.flags import flag
from penstock.cli.store_flags import add_store_flags, print_json, show_time, store_from
from penstock.tenancy.documents import tenant_document
from penstock.tenancy.tenants import Budget, CacheScope, Limits, PriorityClass, Tenant
from penstock.terminal.tables import aligned, print_table

_HELP = {
    "requests_per_minute": "requests in any 60 seconds; all of them may come at once",
    "tokens_per_minute": "tokens in any 60 seconds, prompts and answers together; all of them may come at once",
    "smooth": "spread both over the minute, so that a sixth may come at once (default: no)",
    "concurrency": "requests at once",
    "max_input": "tokens of a prompt",
    "max_output": "tokens of an answer",
    "tokens_per_day": "tokens per calendar day, UTC",
    "tokens_per_month": "tokens per calendar month, UTC",
    "money_per_day": "money per day, where prices are configured",
    "money_per_month": "money per month",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in {
        "add": "a new tenant; it needs a key next: penstock keys create TENANT",
        "set": "change what is given, and leave the rest; 'none' takes a limit away",
        "show": "all about one tenant",
        "list": "all tenants",
        "remove": "a tenant and its keys; what it used stays on record",
    }.items():
        command = verbs.add_parser(verb, help=text)
        if verb != "list":
            command.add_argument("tenant", metavar="TENANT", help="its id: lower-case letters, digits, . _ -")
        if verb in ("add", "set"):
            _add_fields(command)
        add_store_flags(command)


def _add_fields(command: argparse.ArgumentParser) -> None:
    given: dict[str, Any] = {"default": argparse.SUPPRESS}
    command.add_argument("--name", help="for people", **given)
    for section, cls in (("limits", Limits), ("budget", Budget)):
        group = command.add_argument_group(f"{section}; none: no limit")
        for name in cls.__struct_fields__:
            kind = float if name.startswith("money") else int
            value: dict[str, Any] = {"type": _or_none(kind), "metavar": "X" if kind is float else "N"}
            if name == "smooth":
                value = {"action": argparse.BooleanOptionalAction}
            group.add_argument(flag(name), dest=f"{section}.{name}", help=_HELP[name], **value, **given)
    command.add_argument(
        "--models", type=_names, metavar="NAME,…", help="models it may use: names, patterns (default: '*')", **given
    )
    command.add_argument(
        "--adapters", type=_names, metavar="NAME,…", help="adapters it may use (default: none; '*' is all)", **given
    )
    command.add_argument("--priority", choices=[str(one) for one in PriorityClass], help="(default: standard)", **given)
    command.add_argument(
        "--weight", type=float, metavar="X", help="its share of a replica that others use too (default: 1)", **given
    )
    command.add_argument(
        "--cache", choices=[str(one) for one in CacheScope], help="prompts kept in the cache (default: own)", **given
    )
    command.add_argument(
        "--watermark", type=_or_none(str), metavar="NAME", help="of its answers; the replicas have its secret", **given
    )
    command.add_argument(
        "--route-headers",
        action=argparse.BooleanOptionalAction,
        help="whether its answers say why their replica was picked, and so how busy the fleet is (default: no)",
        **given,
    )
    command.add_argument(
        "--stays",
        action=argparse.BooleanOptionalAction,
        help="whether in a rollout of a model the old version answers it to the end, and nothing of its is copied "
        "(default: no)",
        **given,
    )
    command.add_argument(
        "--active", dest="is_active", action=argparse.BooleanOptionalAction, help="whether its keys work", **given
    )


def run(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        match arguments.verb:
            case "add":
                _tell(store.add_tenant({"id": arguments.tenant, **_fields(arguments)}), arguments, "added")
            case "set":
                _tell(store.update_tenant(arguments.tenant, _fields(arguments)), arguments, "changed")
            case "remove":
                store.remove_tenant(arguments.tenant)
                print(f"removed tenant {arguments.tenant} and its keys; its usage stays on record", file=sys.stderr)
            case "show":
                _show(store.tenant(arguments.tenant), arguments.json)
            case "list":
                _list(store.tenants(), arguments.json)


_OWN = ("name", "models", "adapters", "priority", "weight", "cache", "watermark", "route_headers", "stays", "is_active")


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, in the shape of a tenant."""
    values: dict[str, Any] = {}
    for key, value in vars(arguments).items():
        section, dot, name = key.partition(".")
        if dot:
            values.setdefault(section, {})[name] = value
        elif key in _OWN:
            values[key] = value
    return values


def _tell(tenant: Tenant, arguments: argparse.Namespace, done: str) -> None:
    if arguments.json:
        print_json(tenant_document(tenant))
    else:
        print(f"{done} tenant {tenant.id}")


def _show(tenant: Tenant, as_json: bool) -> None:
    if as_json:
        print_json(tenant_document(tenant))
        return
    rows = {
        "id": tenant.id,
        "name": tenant.name,
        "active": "yes" if tenant.is_active else "no",
        "created": show_time(tenant.created_at),
        "priority": tenant.priority,
        "weight": f"{tenant.weight:g}",
        "cache": tenant.cache,
        "watermark": tenant.watermark or "-",
        "route headers": "yes" if tenant.route_headers else "no",
        "stays in rollouts": "yes" if tenant.stays else "no",
        "models": _joined(tenant.models),
        "adapters": _joined(tenant.adapters),
    }
    for section in (tenant.limits, tenant.budget):
        rows |= {name.replace("_", " "): _number(getattr(section, name)) for name in section.__struct_fields__}
    print(*aligned(rows.items(), left=(0, 1)), sep="\n")


def _list(tenants: list[Tenant], as_json: bool) -> None:
    if as_json:
        print_json([tenant_document(tenant) for tenant in tenants])
        return
    if not tenants:
        print("no tenants yet: penstock tenants add NAME", file=sys.stderr)
        return
    print_table(
        ("TENANT", "PRIORITY", "REQUESTS/MIN", "TOKENS/MIN", "CONCURRENCY", "MODELS", "ACTIVE"),
        [
            (
                tenant.id,
                str(tenant.priority),
                _number(tenant.limits.requests_per_minute),
                _number(tenant.limits.tokens_per_minute),
                _number(tenant.limits.concurrency),
                _joined(tenant.models),
                "yes" if tenant.is_active else "no",
            )
            for tenant in tenants
        ],
    )


def _joined(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _number(value: float | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}"


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _or_none(kind: type[int] | type[float] | type[str]) -> Callable[[str], float | str | None]:
    def parse(text: str) -> float | str | None:
        return None if text == "none" else kind(text)

    parse.__name__ = kind.__name__  # argparse names it in its errors
    return parse
