"""`penstock keys`: what clients send to say who they are. A new key is all that goes to standard output."""

from __future__ import annotations

import argparse
import sys
import time

from penstock.cli.store_flags import add_store_flags, duration, print_json, show_time, store_from
from penstock.tenancy.documents import key_document, new_key_document
from penstock.tenancy.keys import ApiKey, NewKey, key_id_of
from penstock.terminal.tables import print_table


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    create = verbs.add_parser("create", help="a new key; it is printed once and kept only as a hash")
    create.add_argument("tenant", metavar="TENANT")
    create.add_argument("--name", default="", help="for people: what it is for")
    create.add_argument("--expires-in", type=duration, metavar="TIME", help="such as 90d (default: never)")

    listing = verbs.add_parser("list", help="keys, without their secrets")
    listing.add_argument("tenant", nargs="?", metavar="TENANT", help="(default: all tenants)")

    revoke = verbs.add_parser("revoke", help="end a key, at once and on every gateway")
    rotate = verbs.add_parser("rotate", help="a new key in place of another")
    for command in (revoke, rotate):
        command.add_argument("key", metavar="KEY", help="its id, as the list shows it")
    rotate.add_argument(
        "--grace",
        type=duration,
        default=0.0,
        metavar="TIME",
        help="let the old one work on, such as 24h (default: end it)",
    )
    for command in (create, listing, revoke, rotate):
        add_store_flags(command)


def run(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        match arguments.verb:
            case "create":
                expires_at = None if arguments.expires_in is None else time.time() + arguments.expires_in
                key = store.create_key(arguments.tenant, name=arguments.name, expires_at=expires_at)
                _hand_over(key, arguments.json)
            case "rotate":
                old = key_id_of(arguments.key)
                _hand_over(store.rotate_key(old, grace_s=arguments.grace), arguments.json)
                ends = f"works until {show_time(time.time() + arguments.grace)} UTC" if arguments.grace else "has ended"
                print(f"the old key psk_{old} {ends}", file=sys.stderr)
            case "revoke":
                revoked = store.revoke_key(key_id_of(arguments.key))
                print(f"revoked {revoked.prefix} of tenant {revoked.tenant_id}", file=sys.stderr)
            case "list":
                _list(store.keys(arguments.tenant), arguments.json)


def _hand_over(key: NewKey, as_json: bool) -> None:
    record = key.record
    if as_json:
        print_json(new_key_document(key))
    else:
        print(key.secret)
    print(f"key {record.prefix} for tenant {record.tenant_id}: keep it now, it cannot be shown again", file=sys.stderr)


def _list(keys: list[ApiKey], as_json: bool) -> None:
    if as_json:
        print_json([key_document(key) for key in keys])
    elif not keys:
        print("no keys yet: penstock keys create TENANT", file=sys.stderr)
    else:
        now_s = time.time()
        print_table(
            ("KEY", "TENANT", "NAME", "CREATED", "STATE"),
            [(key.prefix, key.tenant_id, key.name, show_time(key.created_at), _state(key, now_s)) for key in keys],
        )


def _state(key: ApiKey, now_s: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {show_time(key.revoked_at)}"
    if key.expires_at is None:
        return "active"
    return f"{'active until' if now_s < key.expires_at else 'expired'} {show_time(key.expires_at)}"
