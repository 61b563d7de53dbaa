"""Blocks in host memory, where cached blocks live on when the device hands theirs out for something else.

A block is named by its hash, as on the device, and its id follows the device's: one space for whoever copies blocks. It
is worth keeping only while copying a block back takes less time than computing it again; both are measured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

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
        self._parents: dict[BlockHash, BlockHash] = {}
        self._children: dict[BlockHash, dict[BlockHash, None]] = {}
        self._noted: list[BlockHash] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, own: BlockHash) -> bool:
        return own in self._ids

    # -- whether it pays

    def observe(self, prefill_tokens: int, step_s: float, num_decodes: int = 0, num_loaded: int = 0) -> None:
        """A step computed so many tokens of prompts, and of others beside them, which take their share of it; and it
        waited for so many blocks, which tells nothing of computing."""
        computing_s = step_s - num_loaded * self._copy_s
        if prefill_tokens > 0 and computing_s > 0:
            self._prefill_tokens = _KEEP * self._prefill_tokens + prefill_tokens
            self._prefill_s = _KEEP * self._prefill_s + computing_s * prefill_tokens / (prefill_tokens + num_decodes)

    @property
    def pays(self) -> bool:
        """Until something else is measured it does."""
        return not self._prefill_s or self._copy_s * self._prefill_tokens <= self._block_size * self._prefill_s

    # -- blocks

    def keep(self, own: BlockHash, parent: BlockHash) -> int | None:
        """Where a block goes that the device gives up; at the price of the one used longest ago. None: it is here, or
        not worth it."""
        if own in self._ids:
            self._ids.move_to_end(own)
            return None
        if not self.pays or not (self._free or self._ids):
            return None
        block_id = self._free.pop() if self._free else self._pop(next(iter(self._ids)))
        self._add(own, parent, block_id)
        return block_id

    def take(self, own: BlockHash) -> int:
        """Its block, which is nobody's until it is put back: what is kept meanwhile must not go there."""
        return self._pop(own)

    def put_back(self, own: BlockHash, parent: BlockHash, block_id: int) -> None:
        """It is copied to the device, and stays here."""
        self.num_loaded += 1
        if own in self._ids:  # the device had it too, further on in a chain, and gave it up meanwhile
            self._free.append(block_id)
        else:
            self._add(own, parent, block_id)

    def is_here(self, block_id: int) -> bool:
        return block_id >= self._first_id

    def lose(self, block_id: int) -> None:
        """What was to be copied here was not."""
        own = next((own for own, known in self._ids.items() if known == block_id), None)
        if own is not None:
            self._free.append(self._pop(own))

    def _add(self, own: BlockHash, parent: BlockHash, block_id: int) -> None:
        self._ids[own] = block_id
        self._parents[own] = parent
        self._children.setdefault(parent, {})[own] = None
        self._note(own)

    def _pop(self, own: BlockHash) -> int:
        siblings = self._children[parent := self._parents.pop(own)]
        del siblings[own]
        if not siblings:
            del self._children[parent]
        self._note(own)
        return self._ids.pop(own)

    # -- which blocks follow which

    def parent(self, own: BlockHash) -> BlockHash | None:
        """None: it is not here."""
        return self._parents.get(own)

    def is_met(self, own: BlockHash) -> bool:
        """It is here, or one that follows it."""
        return own in self._ids or own in self._children

    def following(self, parent: BlockHash) -> Iterable[BlockHash]:
        """The blocks here that come next after `parent`, whether or not that one is here."""
        return self._children.get(parent, ())

    def note_changes(self, noted: list[BlockHash]) -> None:
        """From now on the hash of every block that comes or goes is added to this list."""
        self._noted = noted

    def _note(self, own: BlockHash) -> None:
        if self._noted is not None:
            self._noted.append(own)
