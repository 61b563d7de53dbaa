"""Blocks in host memory, where cached blocks live on when the device hands theirs out for something else.

A block is named by its hash, as on the device, and its id follows the device's: one space for whoever copies blocks. It
is worth keeping only while copying a block back takes less time than computing it again; both are measured.
"""

from __future__ import annotations

from collections import OrderedDict

from penstock.core.hashing import BlockHash

_KEEP = 0.95  # of what was known, at every step


class HostBlocks:
    def __init__(self, num_blocks: int, first_id: int, *, block_size: int, copy_s: float = 0.0) -> None:
        """`copy_s`: what it takes to copy one block to the host and back."""
        self.num_blocks = num_blocks
        self.num_loaded = 0  # copied back, since the start
        self._first_id = first_id
        self._block_size = block_size
        self._copy_s = copy_s
        self._prefill_tokens, self._prefill_s = 0.0, 0.0
        self._free = list(range(first_id + num_blocks - 1, first_id - 1, -1))
        self._ids: OrderedDict[BlockHash, int] = OrderedDict()  # the one used longest ago comes first

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, own: BlockHash) -> bool:
        return own in self._ids

    # -- whether it pays

    def observe(self, prefill_tokens: int, step_s: float) -> None:
        """A step computed so many tokens of prompts."""
        if prefill_tokens > 0:
            self._prefill_tokens = _KEEP * self._prefill_tokens + prefill_tokens
            self._prefill_s = _KEEP * self._prefill_s + step_s

    @property
    def pays(self) -> bool:
        """Until something else is measured it does."""
        return not self._prefill_s or self._copy_s * self._prefill_tokens <= self._block_size * self._prefill_s

    # -- blocks

    def keep(self, own: BlockHash) -> int | None:
        """Where a block goes that the device gives up; at the price of the one used longest ago. None: it is here, or
        not worth it."""
        if own in self._ids:
            self._ids.move_to_end(own)
            return None
        if not self.pays or not (self._free or self._ids):
            return None
        if not self._free:
            self._free.append(self._ids.popitem(last=False)[1])
        self._ids[own] = self._free.pop()
        return self._ids[own]

    def take(self, own: BlockHash) -> int:
        """Its block, which is nobody's until it is put back: what is kept meanwhile must not go there."""
        return self._ids.pop(own)

    def put_back(self, own: BlockHash, block_id: int) -> None:
        """It is copied to the device, and stays here."""
        self.num_loaded += 1
        if own in self._ids:  # the device had it too, further on in a chain, and gave it up meanwhile
            self._free.append(block_id)
        else:
            self._ids[own] = block_id

    def is_here(self, block_id: int) -> bool:
        return block_id >= self._first_id

    def lose(self, block_id: int) -> None:
        """What was to be copied here was not."""
        own = next((own for own, known in self._ids.items() if known == block_id), None)
        if own is not None:
            self._free.append(self._ids.pop(own))
