"""LoRA slots: which adapters are on the device, and which sequences need them. It has never seen a weight.

A sequence holds its adapter's slot while it runs, so what runs is never displaced. The least recently used of the
others gives way. An adapter that finds every slot held waits, and others overtake it; once it has waited long enough,
no sequence behind it gets a slot that it could have had, so that one becomes free.
"""

from __future__ import annotations

from collections import Counter

from penstock.sched.plan import StepPlan
from penstock.sched.sequence import Sequence


class AdapterSlots:
    def __init__(self, num_slots: int, *, patience_s: float = 1.0) -> None:
        self.num_slots = num_slots
        self.swaps = 0  # adapters that were put onto the device
        self._patience_s = patience_s
        self._slots: dict[str, int] = {}  # by digest; who was used longest ago comes first
        self._free = list(reversed(range(num_slots)))
        self._known: Counter[str] = Counter()  # sequences of each, waiting or running
        self._holders: Counter[str] = Counter()  # those that run
        self._pinned: set[str] = set()
        self._placements: list[tuple[int, str]] = []
        self._is_owed = False  # somebody has waited long enough for the next slot

    @property
    def resident(self) -> list[str]:
        """Adapters on the device, now or with the next step."""
        return list(self._slots)

    def is_needed(self, adapter: str) -> bool:
        """Whether a sequence that is here needs the adapter, or it is pinned to the device."""
        return self._known[adapter] > 0 or adapter in self._pinned

    def is_pinned(self, adapter: str) -> bool:
        return adapter in self._pinned

    # -- sequences -----------------------------------------------------------------------------------------------------

    def arrive(self, sequence: Sequence) -> None:
        assert self.num_slots or sequence.request.adapter is None, "this engine runs no adapters"
        if (adapter := sequence.request.adapter) is not None:
            self._known[adapter.digest] += 1

    def leave(self, sequence: Sequence) -> None:
        """It has ended."""
        self.exit(sequence)
        if (adapter := sequence.request.adapter) is not None:
            self._known[adapter.digest] -= 1

    def begin(self) -> None:
        """The waiting are about to be looked through, first comers first."""
        self._is_owed = False

    def lets_in(self, sequence: Sequence, now: float) -> bool:
        """Whether it could run now, as far as adapters go."""
        adapter = sequence.request.adapter
        if adapter is None or (adapter.digest in self._pinned and adapter.digest in self._slots):
            return True
        if self._is_owed:
            return False
        if adapter.digest in self._slots or self._has_room:
            return True
        self._is_owed = now - sequence.arrival_s >= self._patience_s
        return False

    def enter(self, sequence: Sequence) -> None:
        """It begins to run, having been let in."""
        if (adapter := sequence.request.adapter) is not None:
            sequence.slot = self._place(adapter.digest)
            self._holders[adapter.digest] += 1

    def exit(self, sequence: Sequence) -> None:
        """It runs no longer, if it did: it has ended, or waits again."""
        if sequence.slot is not None and sequence.request.adapter is not None:
            self._holders[sequence.request.adapter.digest] -= 1
            sequence.slot = None

    # -- adapters ------------------------------------------------------------------------------------------------------

    def pin(self, adapter: str) -> bool:
        """Keep it on the device from now on. False: a slot must be left for the others."""
        if adapter not in self._pinned and len(self._pinned) + 1 >= self.num_slots:
            return False
        self._pinned.add(adapter)
        if self._has_room:  # else when it is first used
            self._place(adapter)
        return True

    def unpin(self, adapter: str) -> None:
        self._pinned.discard(adapter)

    def drop(self, adapter: str) -> int | None:
        """It is gone for good; nobody runs with it. The slot where it was."""
        assert not self._holders[adapter]
        self._pinned.discard(adapter)
        slot = self._slots.pop(adapter, None)
        if slot is not None:
            self._free.append(slot)
            self._placements = [each for each in self._placements if each != (slot, adapter)]
        return slot

    def placed(self, plan: StepPlan) -> StepPlan:
        """The plan, with what is to be put where before its step."""
        if self._placements:
            plan.placements.extend(self._placements)
            self._placements = []
        return plan

    def undo(self, plan: StepPlan) -> None:
        """Its step failed and all that were in it have ended: what it was to put onto the device may not be there."""
        for _, adapter in plan.placements:
            if adapter in self._slots and not self._holders[adapter]:
                self._free.append(self._slots.pop(adapter))

    def _place(self, adapter: str) -> int:
        """Its slot; from now on it is the one that was used last."""
        slot = self._slots.pop(adapter, None)
        if slot is None:
            slot = self._take_slot()
            self._placements.append((slot, adapter))
            self.swaps += 1
        self._slots[adapter] = slot
        return slot

    @property
    def _has_room(self) -> bool:
        return bool(self._free) or self._idle() is not None

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        idle = self._idle()
        assert idle is not None, "it was not let in"
        return self._slots.pop(idle)

    def _idle(self) -> str | None:
        return next((a for a in self._slots if not self._holders[a] and a not in self._pinned), None)
