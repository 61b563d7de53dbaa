"""Slots of recurrent states: which sequence has which, and which hold snapshots for others to go on from. Integers
only; what lies in a slot is the runner's.

Slot 0 is nobody's: padding goes there. A sequence takes a slot with its blocks and gives it back with them. A snapshot
is a copy of a state as it was at the end of a block, found by that block's hash: blocks of a prefix alone let nobody go
on, since what the prefix has left in a state is in none of them. Snapshots lie in slots of their own behind those of
sequences; the least recently used one goes first.
"""

from __future__ import annotations

from collections import OrderedDict

from penstock.core.hashing import BlockHash

MIN_TOKENS = 64  # of a prefix: a snapshot takes as much memory as thousands of tokens, and a step to stop at


class StateSlots:
    def __init__(self, num_slots: int, num_snapshots: int = 0, *, min_tokens: int = MIN_TOKENS) -> None:
        """`min_tokens`: of a prefix of which a snapshot is worth taking."""
        self.num_slots = num_slots
        self.num_snapshots = num_snapshots
        self.min_tokens = min_tokens
        self.moves: list[tuple[int, int]] = []  # (source, destination) of states to be copied, in this order
        self._free = list(range(num_slots, 0, -1))
        self._taken: set[int] = set()
        self._spare = list(range(num_slots + num_snapshots, num_slots, -1))
        self._snapshots: OrderedDict[BlockHash, int] = OrderedDict()  # who was used longest ago comes first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, own: BlockHash) -> bool:
        """Whether there is a snapshot at the end of this block."""
        return own in self._snapshots

    def allocate(self) -> int | None:
        """A slot, whatever was left in it; None if all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        assert slot in self._taken, f"slot {slot} was given back more often than it was taken"
        self._taken.remove(slot)
        self._free.append(slot)

    def keep(self, slot: int, own: BlockHash) -> None:
        """The state in this slot is one at the end of this block until the next step: take a snapshot before it."""
        if own in self._snapshots:
            self._snapshots.move_to_end(own)
            return
        if not self.num_snapshots:
            return
        kept = self._spare.pop() if self._spare else self._snapshots.popitem(last=False)[1]
        self._snapshots[own] = kept
        self.moves.append((slot, kept))

    def resume(self, own: BlockHash, slot: int) -> None:
        """The next step begins with a copy of this snapshot in the slot."""
        self._snapshots.move_to_end(own)
        self.moves.append((self._snapshots[own], slot))

    def take_moves(self) -> list[tuple[int, int]]:
        """Copies of states since the last call: the next step makes them before its slices run."""
        moves, self.moves = self.moves, []
        return moves

    def clear(self) -> None:
        """Forget all snapshots: their memory goes, or a step failed and nobody knows of what they are."""
        self._spare += self._snapshots.values()
        self._snapshots.clear()
        self.moves.clear()
