"""The number that every change to tenants, keys and admins takes, so that followers can ask for what is new."""

from __future__ import annotations

from penstock.tenancy.database import Database, Execute


def next_revision(database: Database, execute: Execute) -> int:
    """First in every change: the counter's row is locked until the commit, so changes come one after another. Whoever
    follows is woken by the commit."""
    ((revision,),) = execute("UPDATE store_revision SET value = value + 1 RETURNING value")
    database.notify(execute)
    return int(revision)
