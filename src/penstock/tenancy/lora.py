"""The record of the adapters that gateways have brought to replicas because a configuration named them.

It outlives the gateways, so that one that starts with another configuration knows what it may take away: what somebody
loaded by hand is not in here.
"""

from __future__ import annotations

from penstock.tenancy.database import Database


class AdapterBook:
    """The store's part of it. Blocks: for commands and for threads of their own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def bring(self, replica: str, name: str) -> bool:
        """It is about to be brought there. False: it was before."""
        with self._database.writing() as execute:
            if execute("SELECT 1 FROM brought_adapters WHERE replica = ? AND name = ?", (replica, name)):
                return False
            execute(
                "INSERT INTO brought_adapters (replica, name) VALUES (?, ?) ON CONFLICT (replica, name) DO NOTHING",
                (replica, name),
            )
        return True

    def forget(self, replica: str, name: str) -> None:
        """It is no longer there, or was not brought after all."""
        with self._database.writing() as execute:
            execute("DELETE FROM brought_adapters WHERE replica = ? AND name = ?", (replica, name))

    def all(self) -> dict[str, set[str]]:
        """Returns the names of adapters by replica."""
        found: dict[str, set[str]] = {}
        with self._database.reading() as execute:
            for replica, name in execute("SELECT replica, name FROM brought_adapters"):
                found.setdefault(str(replica), set()).add(str(name))
        return found
