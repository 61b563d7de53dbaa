"""The adapters of a runner that are in host memory, by digest.

Other modules decide which of them are kept, and which have a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import ModelCorrupt
from penstock.hub.peft import read_peft
from penstock.model.lora import AdapterBank, HostAdapter
from penstock.model.lora_slots import Slots


class RunnerAdapters:
    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._kept: dict[str, HostAdapter] = {}

    @property
    def slots(self) -> Slots:
        """Adapters that lie on the device."""
        return self._bank.slots

    @property
    def num_slots(self) -> int:
        return self._bank.num_slots

    def read(self, path: str, digest: str) -> HostAdapter:
        """Adapter from its directory, if that still holds the one of this digest. Blocks; any thread may call it."""
        found = read_peft(Path(path))
        if found.digest != digest:
            raise ModelCorrupt(f"the adapter {path} is no longer the one that was loaded; load it again")
        return self._bank.fit(found)

    def keep(self, adapter: HostAdapter) -> None:
        self._kept[adapter.digest] = adapter

    def forget(self, digest: str) -> None:
        """Drops the adapter from host memory; on the device it stays until its slot is another's."""
        self._kept.pop(digest, None)

    def clear(self, slot: int) -> None:
        self._bank.clear(slot)

    def place(self, placements: Sequence[tuple[int, str]]) -> None:
        for slot, digest in placements:
            self._bank.place(slot, self._kept[digest])
