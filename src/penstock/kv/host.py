"""Blocks in host memory, where cached blocks live on when the device hands theirs out for something else.

A block is named by its hash, as on the device, and its id follows the device's: one space for whoever copies blocks. It
is worth keeping only while copying a block back takes less time than computing it again; both are measured.

Below the host there may be a disk, whose threads read and write blocks of the host by themselves. So it is known here
which blocks they must not be given (a step in flight copies them), and which no step may be given (they are written).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from penstock.core.hashing import BlockHash
from penstock.kv.chains import BlockChains
from penstock.kv.disk import DiskBlocks

_KEEP = 0.95  # of what was known, at every step


class HostBlocks:
    def __init__(self, num_blocks: int, first_id: int, *, block_size: int, copy_s: float = 0.0) -> None:
        """`copy_s`: what it takes to copy one block to the host and back."""
        self.num_blocks = num_blocks
        self.num_loaded = 0  # copied back, since the start
        self.copy_s = copy_s
        self.disk: DiskBlocks | None = None  # where blocks are written, and come back from
        self._first_id = first_id
        self._block_size = block_size
        self._prefill_tokens, self._prefill_s = 0.0, 0.0
        self._free = list(range(first_id + num_blocks - 1, first_id - 1, -1))
        self._ids: OrderedDict[BlockHash, int] = OrderedDict()  # the one used longest ago comes first
        self._hashes: dict[int, BlockHash] = {}
        self._chains = BlockChains()
        self._moving: Counter[int] = Counter()  # copies from and to each block, by steps that have not ended
        self._pinned: set[int] = set()  # blocks that are being written to disk

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, own: BlockHash) -> bool:
        return own in self._ids

    # -- whether it pays

    def observe(self, prefill_tokens: int, step_s: float, num_decodes: int = 0, num_loaded: int = 0) -> None:
        """A step computed so many tokens of prompts, and of others beside them, which take their share of it; and it
        waited for so many blocks, which tells nothing of computing."""
        computing_s = step_s - num_loaded * self.copy_s
        if prefill_tokens > 0 and computing_s > 0:
            self._prefill_tokens = _KEEP * self._prefill_tokens + prefill_tokens
            self._prefill_s = _KEEP * self._prefill_s + computing_s * prefill_tokens / (prefill_tokens + num_decodes)

    @property
    def computing_s(self) -> float | None:
        """Seconds to compute a block; None: not measured yet."""
        return self._block_size * self._prefill_s / self._prefill_tokens if self._prefill_s else None

    @property
    def pays(self) -> bool:
        """Whether copying takes no longer than computing; assumed until something else is measured."""
        return not self._prefill_s or self.copy_s * self._prefill_tokens <= self._block_size * self._prefill_s

    # -- blocks

    def keep(self, own: BlockHash, parent: BlockHash) -> int | None:
        """Place for a block that the device gives up, at the price of the least recently used one. None: it is here, or
        not worth it."""
        if own in self._ids:
            self._ids.move_to_end(own)
            return None
        block_id = self._claim() if self.pays else None
        if block_id is not None:
            self._add(own, parent, block_id)
            self._moving[block_id] += 1
        return block_id

    def take(self, own: BlockHash) -> int:
        """Its block, which is nobody's until it is put back: what is kept meanwhile must not go there."""
        return self._pop(own)

    def put_back(self, own: BlockHash, parent: BlockHash, block_id: int) -> None:
        """It is copied to the device, and stays here."""
        self.num_loaded += 1
        self._moving[block_id] += 1
        if own in self._ids:  # the device had it too, further on in a chain, and gave it up meanwhile
            self._free.append(block_id)
        else:
            self._add(own, parent, block_id)

    def is_here(self, block_id: int) -> bool:
        return block_id >= self._first_id

    def lose(self, block_id: int) -> None:
        """Drops a block that was to be copied here and was not."""
        own = self._hashes.get(block_id)
        if own is not None:
            self._free.append(self._pop(own))

    def end_move(self, block_id: int) -> None:
        """A step that copied from or to this block has ended, or will never be."""
        self._moving[block_id] -= 1
        if self._moving[block_id] <= 0:
            del self._moving[block_id]
            if self.disk is not None and (own := self._hashes.get(block_id)) is not None:
                self.disk.offer(own)

    def _claim(self, *, at_rest: bool = False) -> int | None:
        """A block for other content, at the price of the one used longest ago. `at_rest`: steps in flight have nothing
        to do with it. None: all are taken."""
        for place in range(len(self._free) - 1, -1, -1):
            if self._may_change(self._free[place], at_rest=at_rest):
                return self._free.pop(place)
        for own, block_id in self._ids.items():
            if self._may_change(block_id, at_rest=at_rest):
                if self.disk is not None:
                    self.disk.leave_host(own)
                return self._pop(own)
        return None

    def _may_change(self, block_id: int, *, at_rest: bool) -> bool:
        return block_id not in self._pinned and not (at_rest and block_id in self._moving)

    def _add(self, own: BlockHash, parent: BlockHash, block_id: int) -> None:
        self._ids[own] = block_id
        self._hashes[block_id] = own
        self._chains.add(own, parent)

    def _pop(self, own: BlockHash) -> int:
        self._chains.remove(own)
        block_id = self._ids.pop(own)
        del self._hashes[block_id]
        return block_id

    # -- blocks that the disk reads and writes

    def pin(self, own: BlockHash) -> tuple[int, BlockHash] | None:
        """Its block and what comes before it, for the disk to write; nothing else goes there before `unpin`. None: it
        is not here, or not yet."""
        block_id, parent = self._ids.get(own), self._chains.parent(own)
        if block_id is None or parent is None or block_id in self._moving:
            return None
        self._pinned.add(block_id)
        return block_id - self._first_id, parent

    def unpin(self, block: int) -> None:
        self._pinned.discard(block + self._first_id)

    def touch(self, own: BlockHash) -> None:
        """It is about to be used."""
        if own in self._ids:
            self._ids.move_to_end(own)

    def claim(self) -> int | None:
        """A block for the disk to read into."""
        block_id = self._claim(at_rest=True)
        return block_id - self._first_id if block_id is not None else None

    def fill(self, block: int, own: BlockHash, parent: BlockHash) -> None:
        """A claimed block has this content now."""
        if own in self._ids:  # the device gave it up meanwhile
            self.give_back(block)
        else:
            self._add(own, parent, block + self._first_id)

    def give_back(self, block: int) -> None:
        """A claimed block has no content."""
        self._free.append(block + self._first_id)

    # -- which blocks follow which, on the host and on disk

    def is_known(self, own: BlockHash) -> bool:
        return own in self._ids or (self.disk is not None and own in self.disk)

    def parent(self, own: BlockHash) -> BlockHash | None:
        """None: it is in neither place."""
        found = self._chains.parent(own)
        return found if found is not None or self.disk is None else self.disk.chains.parent(own)

    def is_met(self, own: BlockHash) -> bool:
        """It is in one of the places, or one that follows it."""
        return self._chains.is_met(own) or (self.disk is not None and self.disk.chains.is_met(own))

    def following(self, parent: BlockHash) -> Iterable[BlockHash]:
        """The blocks in either place that come next after `parent`; one may be there twice."""
        here = self._chains.following(parent)
        return here if self.disk is None else (*here, *self.disk.chains.following(parent))

    def note_changes(self, noted: list[BlockHash]) -> None:
        """Adds the hash of every block that comes or goes from now on to this list."""
        self._chains.note_changes(noted)
        if self.disk is not None:
            self.disk.chains.note_changes(noted)
