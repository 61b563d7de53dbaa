"""`penstock admins`: who may use the admin API. A new key is all that goes to standard output."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.store_flags import add_store_flags, print_json, show_time, store_from
from penstock.tenancy.admins import AdminKey, NewAdminKey
from penstock.terminal.tables import print_table


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add = verbs.add_parser("add", help="a new admin and its key, which is printed once and kept only as a hash")
    add.add_argument("name", metavar="NAME", help="lower-case letters, digits, . _ -")
    listing = verbs.add_parser("list", help="admins, without their secrets")
    revoke = verbs.add_parser("revoke", help="end an admin's key, at once and on every gateway")
    revoke.add_argument("admin", metavar="ADMIN", help="its name, or its key's id: psa_…")
    for command in (add, listing, revoke):
        add_store_flags(command)


def run(arguments: argparse.Namespace) -> None:
    with store_from(arguments) as store:
        match arguments.verb:
            case "add":
                _hand_over(store.admins.add(arguments.name), arguments.json)
            case "revoke":
                revoked = store.admins.revoke(arguments.admin)
                print(f"revoked {revoked.prefix} of admin {revoked.name}", file=sys.stderr)
            case "list":
                _list(store.admins.all(), arguments.json)


def _hand_over(key: NewAdminKey, as_json: bool) -> None:
    if as_json:
        print_json({"key": key.secret, **_document(key.record)})
    else:
        print(key.secret)
    print(f"key of admin {key.record.name}: keep it now, it cannot be shown again", file=sys.stderr)


def _list(admins: list[AdminKey], as_json: bool) -> None:
    if as_json:
        print_json([_document(admin) for admin in admins])
    elif not admins:
        print("no admins yet: penstock admins add NAME", file=sys.stderr)
    else:
        print_table(
            ("ADMIN", "KEY", "CREATED", "STATE"),
            [(admin.name, admin.prefix, show_time(admin.created_at), _state(admin)) for admin in admins],
        )


def _state(admin: AdminKey) -> str:
    return "active" if admin.revoked_at is None else f"revoked {show_time(admin.revoked_at)}"


def _document(admin: AdminKey) -> dict[str, object]:
    """Returns the admin without the hash: nobody needs it outside the store."""
    return {name: getattr(admin, name) for name in AdminKey.__struct_fields__ if name != "hash"}
