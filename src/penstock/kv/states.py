"""Slots of recurrent states: which sequence has which. Integers only; what lies in a slot is the runner's.

Slot 0 is nobody's: padding goes there. A sequence takes a slot with its blocks and gives it back with them.
"""

from __future__ import annotations


class StateSlots:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

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
