"""The blocks of the device's KV cache: reference counts, and a free list that is also the prefix cache.

A block that nobody holds goes to the free list but keeps its content and its hash until it is handed out again, so
whatever is free is cache. Blocks are reused from the least recently freed end; a sequence gives its blocks back last
block first, so a prefix outlives its continuations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.hashing import BlockHash
from penstock.core.tiers import Tier
from penstock.kv.host import HostBlocks


@dataclass(slots=True)
class _Block:
    references: int = 0
    hash: BlockHash | None = None  # set once the content is complete and can be found
    parent: BlockHash | None = None
    token_ids: Sequence[int] = ()


@dataclass
class PoolCounters:
    evictions: int = 0  # cached blocks that were handed out for something else


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counters = PoolCounters()
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self._by_hash: dict[BlockHash, int] = {}
        self._children: dict[BlockHash, list[int]] = {}  # parent's hash -> published blocks that follow it
        self._noted: list[BlockHash] | None = None
        self.host: HostBlocks | None = None  # where blocks go that are reused
        self.moves: list[tuple[int, int]] = []  # (source, destination) of blocks to be copied, in this order

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix lookup can find, held or free."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, each with one reference and no content; None if there is no room."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._forget(block_id)
            self._blocks[block_id].references = 1
        return taken

    def is_free(self, block_id: int) -> bool:
        return self._blocks[block_id].references == 0

    def retain(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.references == 0:
            del self._free[block_id]
        block.references += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each, last first."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.references > 0, f"block {block_id} released more often than it was held"
            block.references -= 1
            if block.references == 0:
                self._free[block_id] = None
                if block.hash is None:  # nothing to find in it: first to be reused
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, own: BlockHash, parent: BlockHash, token_ids: Sequence[int]) -> bool:
        """Make a complete block findable. False: its content is known already, and the older block is the one found."""
        if own in self._by_hash:
            return False
        block = self._blocks[block_id]
        assert block.references > 0
        assert block.hash is None
        block.hash, block.parent = own, parent
        block.token_ids = tuple(token_ids) if isinstance(token_ids, list) else token_ids  # a list is its owner's
        self._by_hash[own] = block_id
        self._children.setdefault(parent, []).append(block_id)
        if self._noted is not None and (own in self._children or (self.host is not None and self.host.is_met(own))):
            self._noted.append(own)
        return True

    def find(self, block_hash: BlockHash) -> int | None:
        return self._by_hash.get(block_hash)

    def is_known(self, own: BlockHash) -> bool:
        """Whether it is on the device, on the host or on disk."""
        return own in self._by_hash or (self.host is not None and self.host.is_known(own))

    def tier_of_run(self, last: BlockHash, length: int) -> Tier | None:
        """Tier where this block and those before it, `length` in all, can be found; None: not all of them. Disk counts
        as the host."""
        if self._is_run_here(last, length):
            return Tier.DEVICE
        return Tier.HOST if self.host is not None and self._is_run_known(last, length, self.host) else None

    def _is_run_here(self, last: BlockHash, length: int) -> bool:
        by_hash, blocks, own = self._by_hash, self._blocks, last
        for _ in range(length):
            block_id = by_hash.get(own)
            if block_id is None or (parent := blocks[block_id].parent) is None:
                return False
            own = parent
        return True

    def _is_run_known(self, last: BlockHash, length: int, host: HostBlocks) -> bool:
        """Whether the run is known. Blocks on the host or on disk are found after the device's, not between them."""
        own, has_end_here = last, False  # what comes later is on the device only
        for _ in range(length):
            parent = host.parent(own)
            if (block_id := self._by_hash.get(own)) is not None:
                has_end_here |= parent is None
                parent = self._blocks[block_id].parent
            elif has_end_here:
                return False
            if parent is None:
                return False
            own = parent
        return True

    def following(self, parent: BlockHash) -> list[BlockHash]:
        """The known blocks that come next after `parent`, whether or not that one is; one may be there twice."""
        found, children = [], self._children.get(parent)
        if children is not None:
            found = [own for block_id in children if (own := self._blocks[block_id].hash) is not None]
        return found if self.host is None else [*found, *self.host.following(parent)]

    def note_changes(self) -> list[BlockHash]:
        """Returns a list that is added to from now on: the hash of every block that can no longer be found, of every
        one that can be found again while blocks that follow it still are, and of every one that moves."""
        self._noted = []
        if self.host is not None:
            self.host.note_changes(self._noted)
        return self._noted

    def find_partial(self, parent: BlockHash, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The published block after `parent` that agrees with `token_ids` longest: (block, tokens in common)."""
        best: tuple[int, int] | None = None
        for block_id in self._children.get(parent, ())[-_PARTIAL_CANDIDATES:]:
            common = _common_prefix(self._blocks[block_id].token_ids, token_ids)
            if common > (best[1] if best else 0):
                best = (block_id, common)
        return best

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.hash is None or block.parent is None:
            return
        self.counters.evictions += 1
        if self.host is not None and (kept := self.host.keep(block.hash, block.parent)) is not None:
            self.moves.append((block_id, kept))
        self._unname(block_id)

    def _unname(self, block_id: int) -> None:
        """Nobody finds it any longer."""
        block = self._blocks[block_id]
        assert block.hash is not None
        assert block.parent is not None
        del self._by_hash[block.hash]
        if self._noted is not None:
            self._noted.append(block.hash)
        siblings = self._children[block.parent]
        siblings.remove(block_id)
        if not siblings:
            del self._children[block.parent]
        self._blocks[block_id] = _Block(block.references)

    def spoil(self, block_id: int) -> None:
        """Its content is not what it should be."""
        if self._blocks[block_id].hash is not None:
            self._unname(block_id)

    def clear(self) -> None:
        """No content is what it was."""
        for block_id in list(self._by_hash.values()):
            self._unname(block_id)

    def take_moves(self) -> list[tuple[int, int]]:
        """All since the last call: for the next step, before all else."""
        moves, self.moves = self.moves, []
        return moves


_PARTIAL_CANDIDATES = 8  # a popular prefix may have thousands of continuations; look at the newest few


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
