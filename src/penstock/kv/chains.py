"""Blocks of one tier of the cache by which follow which, and the news of those that come and go."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.hashing import BlockHash


class BlockChains:
    def __init__(self) -> None:
        self._parents: dict[BlockHash, BlockHash] = {}
        self._children: dict[BlockHash, dict[BlockHash, None]] = {}
        self._noted: list[BlockHash] | None = None

    def add(self, own: BlockHash, parent: BlockHash) -> None:
        self._parents[own] = parent
        self._children.setdefault(parent, {})[own] = None
        self._note(own)

    def remove(self, own: BlockHash) -> None:
        siblings = self._children[parent := self._parents.pop(own)]
        del siblings[own]
        if not siblings:
            del self._children[parent]
        self._note(own)

    def parent(self, own: BlockHash) -> BlockHash | None:
        """None: it is not here."""
        return self._parents.get(own)

    def is_met(self, own: BlockHash) -> bool:
        """It is here, or one that follows it."""
        return own in self._parents or own in self._children

    def following(self, parent: BlockHash) -> Iterable[BlockHash]:
        """The blocks here that come next after `parent`, whether or not that one is here."""
        return self._children.get(parent, ())

    def note_changes(self, noted: list[BlockHash]) -> None:
        """Adds the hash of every block that comes or goes from now on to this list."""
        self._noted = noted

    def _note(self, own: BlockHash) -> None:
        if self._noted is not None:
            self._noted.append(own)
